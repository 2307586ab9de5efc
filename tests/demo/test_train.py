"""The parts of the demo that must be exact: gradients, resuming, checkpoints, data."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

import fx_passes
from moe_ops.demo import checkpoint, data
from moe_ops.demo.evaluate import Comparison, StopRequested, compiled_against_eager, experts_at_zero
from moe_ops.demo.model import ByteModel
from moe_ops.demo.progress import latest
from moe_ops.demo.settings import PASSES_PICTURE, PASSES_TEXT, PASSES_TRACE, Job, Settings
from moe_ops.demo.train import Trainer
from moe_ops.parallel import clip_grad_norm_, reduce_gradients
from tests.ranks import run_on_ranks

TINY = Settings(
    steps=6, batch=4, context=16, hidden=32, ffn=16, layers=2, heads=2, experts=4, eval_every=0,
    corpus_megabytes=0.5, no_compile=True, device="cpu",
)  # fmt: skip


class StopAt:
    """Stands for the parent's event: set from the n-th time on that it is looked at."""

    def __init__(self, looks: int) -> None:
        self.looks = looks

    def is_set(self) -> bool:
        self.looks -= 1
        return self.looks < 0


def trainer_of(out: str, world_size: int, stop: StopAt, **settings: Any) -> Trainer:
    chosen = Settings(**{**vars(TINY), "out": out, "world_size": world_size, **settings})
    return Trainer(Job(chosen, latest(chosen.checkpoints), Path(), os.getppid(), stop))


def gradients_of(rank: int, world_size: int, layout: str) -> dict[str, Tensor]:
    """Of the loss of one batch, as a step reduces them, and their norm."""
    trainer = trainer_of("", world_size, StopAt(0), layout=layout)
    model, meshes = trainer.model, trainer.meshes
    torch.manual_seed(1)
    torch.nn.init.normal_(model.head.weight)
    loss, router_loss = model.losses(trainer._training_batch(0))
    (loss + router_loss).backward()
    reduce_gradients(model, meshes)
    norm = clip_grad_norm_(model.parameters(), float("inf"), meshes)
    return {"norm": norm, **{name: full(p.grad) for name, p in model.named_parameters()}}


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@pytest.mark.dist
@pytest.mark.parametrize(
    ("world_size", "layout"), [(2, ""), (4, "ep=2,cp=2"), (4, "ep=2,etp=2,cp=4")]
)
def test_gradients_are_those_of_one_process(world_size: int, layout: str) -> None:
    whole = run_on_ranks(1, gradients_of, 1, "")[0]
    for rank in run_on_ranks(world_size, gradients_of, world_size, layout):
        for name, expected in whole.items():
            found = rank[name].reshape(expected.shape)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def losses_of_run(
    rank: int, out: str, world_size: int, looks: int, settings: dict[str, Any] | None = None
) -> list[float]:
    trainer = trainer_of(out, world_size, StopAt(looks), **settings or {})
    try:
        trainer.start()
        trainer.train()
    except StopRequested:
        pass
    return trainer.progress.loss


@pytest.mark.dist
def test_resumed_run_repeats_an_unbroken_one(tmp_path: Path) -> None:
    whole, broken = (tmp_path / name / "checkpoints" for name in ("whole", "broken"))
    whole.mkdir(parents=True)
    broken.mkdir(parents=True)
    expected = run_on_ranks(2, losses_of_run, str(whole.parent), 2, 1000)[0]
    assert len(expected) == TINY.steps
    # One look at the start, one a step: the flag rises in the third step.
    first = run_on_ranks(2, losses_of_run, str(broken.parent), 2, 3)[0]
    assert first == expected[:3]
    assert run_on_ranks(2, losses_of_run, str(broken.parent), 2, 1000)[0] == expected


@pytest.mark.dist
def test_checkpoint_of_two_ranks_goes_on_with_one(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    root.mkdir()
    two = run_on_ranks(2, losses_of_run, str(tmp_path), 2, 3)[0]
    one = run_on_ranks(1, losses_of_run, str(tmp_path), 1, 1000)[0]
    assert len(one) == TINY.steps
    assert one[:3] == two
    assert one[3] < one[0]


@pytest.mark.dist
def test_layout_trains_as_one_process(tmp_path: Path) -> None:
    """Compared until the end of 20 steps; a checkpoint of the layout goes on with one process."""
    folders = {name: tmp_path / name for name in ("one", "four", "resumed")}
    for folder in folders.values():
        (folder / "checkpoints").mkdir(parents=True)
    long, layout = {"steps": 20}, {"steps": 20, "layout": "ep=2,cp=2"}
    one = run_on_ranks(1, losses_of_run, str(folders["one"]), 1, 1000, long)[0]
    four = run_on_ranks(4, losses_of_run, str(folders["four"]), 4, 1000, layout)
    assert len(one) == 20
    assert one[-1] < one[0] - 1
    assert all(losses == four[0] for losses in four)
    assert four[0] == pytest.approx(one, abs=1e-4)

    # One look at the start, one a step: the flag rises in the eighth step.
    resumed = str(folders["resumed"])
    first = run_on_ranks(4, losses_of_run, resumed, 4, 8, layout)[0]
    assert len(first) == 8
    rest = run_on_ranks(1, losses_of_run, resumed, 1, 1000, long)[0]
    assert rest[:8] == first
    assert rest == pytest.approx(one, abs=1e-4)


@pytest.mark.dist
def test_unfinished_checkpoint_is_not_found(tmp_path: Path) -> None:
    (tmp_path / "partial").mkdir()
    (tmp_path / "partial" / "progress.json").write_text("{")
    assert latest(tmp_path) is None
    (tmp_path / "step_00000100").mkdir()
    (tmp_path / "step_00000020").mkdir()
    assert latest(tmp_path) == tmp_path / "step_00000100"


def compare(rank: int, broken: bool) -> Comparison:
    torch.manual_seed(0)
    model = ByteModel(TINY, dist.group.WORLD)
    torch.nn.init.normal_(model.head.weight)
    for block in model.blocks:
        block.compile(fullgraph=True, backend=twice if broken else "aot_eager")
    tokens_BT = torch.randint(256, (2, 17), generator=torch.Generator().manual_seed(rank))
    return compiled_against_eager(model, tokens_BT)


def twice(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
    """A compiler that is wrong: the block's output comes doubled."""

    def run(*args: Tensor) -> tuple[Tensor, ...]:
        x_BTH, *rest = graph(*args)
        return 2 * x_BTH, *rest

    return run


def explain_on_rank(rank: int, out: str, layout: str) -> None:
    trainer = trainer_of(out, 2, StopAt(1000), layout=layout)
    trainer.passes = fx_passes
    trainer._explain_passes()
    dist.barrier()
    assert not list(Path(out).iterdir()), "nothing was compiled"
    dist.barrier()
    trainer.settings = dataclasses.replace(trainer.settings, no_compile=False)
    trainer._explain_passes()


@pytest.mark.dist
@pytest.mark.parametrize(
    ("layout", "exchange"), [("", "dispatch_start"), ("ep=2,cp=2", "cp_shift_start")]
)
def test_passes_are_explained(layout: str, exchange: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="optional package matplotlib is not installed")
    run_on_ranks(2, explain_on_rank, str(tmp_path), layout, timeout_s=280)
    text = (tmp_path / PASSES_TEXT).read_text()
    assert "exposed in all" in text and exchange in text
    assert (tmp_path / PASSES_PICTURE).read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / PASSES_TRACE).read_text())["traceEvents"]


@pytest.mark.dist
def test_compiled_blocks_equal_eager_ones() -> None:
    ranks = run_on_ranks(2, compare, False)
    assert ranks[0] == ranks[1]
    assert ranks[0].same_routing
    assert ranks[0].difference < 1e-4


@pytest.mark.dist
def test_wrong_compilation_is_found() -> None:
    assert run_on_ranks(2, compare, True)[0].difference > 1e-2


def test_experts_at_zero_restores() -> None:
    model = ByteModel(TINY)
    before = [p.detach().clone() for p in model.parameters()]
    with experts_at_zero(model):
        assert all(not moe.experts.w2.any() for moe in model.moes())
    for p, kept in zip(model.parameters(), before):
        assert torch.equal(p, kept)


def test_corpus_sides_hold_different_files(tmp_path: Path) -> None:
    for number in range(200):
        (tmp_path / f"m{number}.py").write_text(f"<{number}>")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "left_out.py").write_text("never")
    (tmp_path / "note.txt").write_text("never")
    corpus = data.load_corpus(1.0, tmp_path)
    sides = [
        set(bytes(text_N.tolist()).decode().split("\0"))
        for text_N in (corpus.train_N, corpus.validation_N)
    ]
    assert sides[0] & sides[1] == {""}
    assert sides[0] | sides[1] == {"", *(f"<{number}>" for number in range(200))}
    assert 0 < corpus.num_validation_files < 40
    smaller = data.load_corpus(0.0003, tmp_path)
    smaller_train = set(bytes(smaller.train_N.tolist()).decode().split("\0"))
    assert smaller_train < sides[0]


def test_batches_do_not_depend_on_the_number_of_ranks() -> None:
    text_N = torch.arange(2000).to(torch.uint8)
    whole = data.training_batch(text_N, TINY, step=3, rank=0, world_size=1)
    assert whole.shape == (TINY.batch, TINY.context + 1)
    for rank in range(2):
        part = data.training_batch(text_N, TINY, step=3, rank=rank, world_size=2)
        assert torch.equal(part, whole[rank::2])
    assert not torch.equal(whole, data.training_batch(text_N, TINY, step=4, rank=0, world_size=1))
    batches = data.validation_batches(text_N, TINY, num_batches=2, rank=1, world_size=2)
    assert [tuple(b.shape) for b in batches] == [(2, 17), (2, 17)]


def test_moments_are_what_adamw_makes() -> None:
    p = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([p], fused=True)
    checkpoint.create_moments(optimizer)
    ours = {name: (value.dtype, value.shape) for name, value in optimizer.state[p].items()}
    fresh = torch.optim.AdamW([p], fused=True)
    p.grad = torch.ones(3)
    fresh.step()
    assert ours == {name: (value.dtype, value.shape) for name, value in fresh.state[p].items()}
