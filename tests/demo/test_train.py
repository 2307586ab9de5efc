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

import fx_passes
from moe_ops.demo import checkpoint, data
from moe_ops.demo.evaluate import Comparison, StopRequested, compiled_against_eager, experts_at_zero
from moe_ops.demo.gradients import Gradients
from moe_ops.demo.model import ByteModel
from moe_ops.demo.progress import latest
from moe_ops.demo.settings import PASSES_PICTURE, PASSES_TEXT, PASSES_TRACE, Job, Settings
from moe_ops.demo.train import Trainer
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


def gradients_of(rank: int, world_size: int) -> dict[str, Tensor]:
    """Of the mean cross-entropy of one batch, after one step's communication."""
    group = dist.group.WORLD if world_size > 1 else None
    torch.manual_seed(0)
    model = ByteModel(TINY, group)
    torch.nn.init.normal_(model.head.weight)
    gradients = Gradients(model.dense_parameters(), model.expert_parameters(), 1, group)
    tokens_BT = torch.randint(256, (TINY.batch, 17), generator=torch.Generator().manual_seed(1))
    gradients.clear()
    loss, _ = model.losses(tokens_BT[rank::world_size])
    (loss / world_size).backward()
    extra, norm = gradients.sum_over_ranks(loss.detach()[None] / world_size)
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    return {**found, "loss": extra, "norm": norm}


@pytest.mark.dist
def test_gradients_are_those_of_the_mean_loss_over_all_ranks() -> None:
    whole = gradients_of(0, 1)
    ranks = run_on_ranks(2, gradients_of, 2)
    for name, expected in whole.items():
        parts = [rank[name] for rank in ranks]
        if ".experts." in name:
            torch.testing.assert_close(torch.cat(parts), expected, rtol=1e-4, atol=1e-7)
        else:
            assert torch.equal(*parts), name
            torch.testing.assert_close(parts[0], expected, rtol=1e-4, atol=1e-7)
    squares = [g.square().sum() for name, g in whole.items() if name not in ("loss", "norm")]
    torch.testing.assert_close(whole["norm"], torch.stack(squares).sum().sqrt())


def losses_of_run(rank: int, out: str, world_size: int, looks: int) -> list[float]:
    settings = Settings(**{**vars(TINY), "out": out, "world_size": world_size})
    stop = StopAt(looks)
    trainer = Trainer(Job(settings, latest(settings.checkpoints), Path(), os.getppid(), stop))
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
    dense, experts = model.dense_parameters(), model.expert_parameters()
    gradients = Gradients(dense, experts, 0, dist.group.WORLD)
    tokens_BT = torch.randint(256, (2, 17), generator=torch.Generator().manual_seed(rank))
    return compiled_against_eager(model, gradients, tokens_BT)


def twice(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
    """A compiler that is wrong: the block's output comes doubled."""

    def run(*args: Tensor) -> tuple[Tensor, ...]:
        x_BTH, *rest = graph(*args)
        return 2 * x_BTH, *rest

    return run


def explain_on_rank(rank: int, out: str) -> None:
    settings = Settings(**{**vars(TINY), "out": out, "world_size": 2})
    trainer = Trainer(Job(settings, None, Path(), os.getppid(), StopAt(1000)))
    trainer.passes = fx_passes
    trainer._explain_passes()
    dist.barrier()
    assert not list(Path(out).iterdir()), "nothing was compiled"
    dist.barrier()
    trainer.settings = dataclasses.replace(settings, no_compile=False)
    trainer._explain_passes()


@pytest.mark.dist
def test_passes_are_explained(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="optional package matplotlib is not installed")
    run_on_ranks(2, explain_on_rank, str(tmp_path), timeout_s=280)
    text = (tmp_path / PASSES_TEXT).read_text()
    assert "exposed in all" in text and "dispatch_start" in text
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
