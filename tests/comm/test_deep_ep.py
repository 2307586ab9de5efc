"""The engine `deep_ep` with a stand-in for DeepEP: what gloo gives, and when it is refused."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import moe_ops
from moe_ops import comm, kernels
from moe_ops.comm import deep_ep, engines, nvlink
from moe_ops.testing import assert_equal, make_ids
from tests.nn.layers import capacity_fields, check_layer, make_config
from tests.ranks import expect_error_on_ranks, run_on_ranks

from . import fake_deep_ep

SETUP = {"max_tokens": 64, "hidden_size": 64, "dtype": torch.bfloat16}
SPACE = deep_ep.Workspace(None, None, None, torch.int64, 4096)


@contextlib.contextmanager
def carried(**settings: Any) -> Iterator[str]:
    """The world's dispatch and combine run on the stand-in, as if on GPUs."""
    library, group = torch.library.Library("moe_ops", "IMPL"), dist.group.WORLD
    with (
        mock.patch.dict(sys.modules, {"deep_ep": fake_deep_ep}),
        mock.patch.object(deep_ep, "unavailable", return_value=None),
        mock.patch.object(engines, "backend_of", return_value="nccl"),
    ):
        try:
            for op in ("dispatch", "combine"):
                library.impl(op, _chosen(op), "CPU", allow_override=True)
            yield comm.setup(group, **{**SETUP, "engine": "deep_ep", **settings})
        finally:
            library._destroy()
            comm.setup(group, **SETUP, engine="nccl")
    assert comm.engine(group) == "gloo" and not fake_deep_ep.Buffer.alive


def _chosen(op: str) -> Any:
    """What runs on a GPU in place of the reference."""
    return lambda *args: kernels.choose(op, *args)(*args)


@dataclasses.dataclass(frozen=True)
class Case:
    """`mode`: "exact", "capacity", which holds all, or "half" of it, so that some are left out."""

    tokens: tuple[int, int] = (33, 64)
    top_k: int = 4
    num_experts: int = 8
    hidden_size: int = 64
    none_fraction: float = 0.2
    skew: str = "uniform"
    wire: str = "full"
    mode: str = "exact"
    dtype: torch.dtype = torch.bfloat16

    def exchange(self, rank: int) -> dict[str, torch.Tensor]:
        """All that the operators and their gradients give on whole numbers, which bf16 sums up
        without rounding.
        """
        stream = torch.Generator().manual_seed(rank)
        tokens, shape = self.tokens[rank], (self.tokens[rank], self.hidden_size)
        ids_TK = make_ids(
            *(tokens, self.top_k, self.num_experts, self.skew, self.none_fraction),
            *(stream, len(self.tokens)),
        )
        x, addend = (torch.randint(-4, 5, shape, generator=stream).to(self.dtype) for _ in "xa")
        gates = torch.rand(tokens, self.top_k, generator=stream)
        leaves = [leaf.requires_grad_() for leaf in (x, gates, addend)]
        copies = {"exact": None, "capacity": 128, "half": sum(self.tokens) // 3}[self.mode]
        capacities = {} if copies is None else {"copy_capacity": copies, "row_capacity": 512}
        rows, weights, plan = moe_ops.dispatch(
            *(x, ids_TK, gates),
            num_experts=self.num_experts,
            group=dist.group.WORLD,
            max_tokens=64,
            wire=self.wire,
            **capacities,
        )
        alone, none = torch.ops.moe_ops.dispatch(
            x, None, plan.tensors(), dist.group.WORLD.group_name, "full"
        )
        spoilt = torch.where(plan.source_of_copy_D2[:, :1] >= 0, rows, torch.nan)
        out, back = moe_ops.combine(
            spoilt,
            plan,
            group=dist.group.WORLD,
            weights_DK=torch.where(plan.ids_DK >= 0, weights, torch.nan),
            addend_TH=addend,
        )
        plain, _ = moe_ops.combine(rows, plan, group=dist.group.WORLD)
        grads = torch.autograd.grad((out * out).sum() + back.sum() + plain.sum(), leaves)
        results = [rows, weights, alone, none, out, back, plain, *grads]
        return {str(number): value.detach() for number, value in enumerate(results)}


CASES = {
    "plain": Case(),
    "capacity": Case(mode="capacity"),
    "half": Case(mode="half"),
    "own rank empty": Case(tokens=(0, 7)),
    "no tokens": Case(tokens=(0, 0)),
    "no tokens, capacity": Case(tokens=(0, 0), mode="capacity"),
    "all none": Case(none_fraction=1.0),
    "one expert": Case(skew="one expert", none_fraction=0, mode="capacity"),
    "K1": Case(top_k=1, hidden_size=16),
    "K32": Case(top_k=32, num_experts=64, hidden_size=16),
    "fp8": Case(wire="fp8", hidden_size=32),
    "fp8_pow2": Case(wire="fp8_pow2", mode="capacity"),
    "narrow": Case(hidden_size=8),
    "too long": Case(hidden_size=80),
    "float32": Case(dtype=torch.float32),
}
OVER_NCCL = ("narrow", "too long", "float32")


def _results_of_both(rank: int, case: Case) -> tuple[Any, Any, int]:
    expected = case.exchange(rank)
    sent = mock.patch.object(
        fake_deep_ep.Buffer, "dispatch", autospec=True, side_effect=fake_deep_ep.Buffer.dispatch
    )
    with carried(hidden_size=min(case.hidden_size, 64)) as name, sent as dispatch:
        assert name == comm.engine(dist.group.WORLD) == "deep_ep"
        return case.exchange(rank), expected, dispatch.call_count


@pytest.mark.parametrize("name", CASES)
def test_results_and_gradients_are_those_of_gloo(name: str) -> None:
    for found, expected, calls in run_on_ranks(2, _results_of_both, CASES[name]):
        assert (calls == 0) == (name in OVER_NCCL)
        for what, value in found.items():
            assert_equal(f"{name}: result {what}", value, expected[what])


def _layer(rank: int, fields: dict[str, Any]) -> None:
    config = make_config(dispatcher="flex", hidden_size=16, ffn_hidden_size=8, **fields)
    with carried():
        check_layer(rank, config, (33, 64), torch.bfloat16)


@pytest.mark.parametrize("fields", [{}, capacity_fields(64)], ids=["exact", "capacity"])
def test_layer_matches_oracle(fields: dict[str, Any]) -> None:
    run_on_ranks(2, _layer, fields)


def _sms(rank: int) -> tuple[list[int], int]:
    with carried(num_sms=6):
        space = deep_ep.workspace(str(dist.group.WORLD.group_name))
        assert space is not None
        configs = space.dispatch_config, space.combine_config
    return [config.num_sms for config in configs], fake_deep_ep.Buffer.num_sms


def test_num_sms_is_the_groups_alone() -> None:
    assert run_on_ranks(2, _sms) == [([6, 6], 20)] * 2


def _set_up_badly(rank: int, broken: int | None, settings: dict[str, Any]) -> None:
    kind = fake_deep_ep.Buffer
    error = mock.Mock(side_effect=RuntimeError("out of memory"))
    fault = {"__init__": error} if rank == broken else {"num_sms": 20}
    with mock.patch.multiple(kind, **fault), carried(**settings):
        pass


@pytest.mark.parametrize(
    ("broken", "settings", "text"),
    [
        (1, {}, "rank 1: RuntimeError: out of memory"),
        (None, {"num_sms": 5}, "rank 0: AssertionError: The SM count must be even; rank 1: "),
        (None, {"dtype": torch.float32}, "rows are torch.float32, not torch.bfloat16"),
    ],
    ids=["one rank", "odd", "dtype"],
)
def test_what_cannot_be_set_up_is_an_error_on_every_rank(
    broken: int | None, settings: dict[str, Any], text: str
) -> None:
    for kind, message in expect_error_on_ranks(2, _set_up_badly, broken, settings):
        assert kind == "ValueError"
        assert "setup: engine 'deep_ep' cannot carry group" in message and text in message


def _choose(rank: int, modules: dict[str, Any], gpu: bool) -> None:
    name = str(dist.group.WORLD.group_name)
    missing_on_rank_1 = modules if rank else {"deep_ep": fake_deep_ep}
    with (
        mock.patch.dict(sys.modules, missing_on_rank_1),
        mock.patch.object(torch.cuda, "is_available", return_value=gpu),
    ):
        engines._choose(name, "deep_ep", "nccl", torch.bfloat16)


def test_a_package_that_is_absent_is_named_on_every_rank() -> None:
    for kind, text in expect_error_on_ranks(2, _choose, {"deep_ep": None}, True):
        assert kind == "ValueError" and "engine 'deep_ep' cannot carry group" in text
        assert "rank 1: package deep_ep cannot be imported (" in text and "rank 0" not in text


def test_ranks_without_a_gpu_say_so() -> None:
    for _, text in expect_error_on_ranks(2, _choose, {}, False):
        assert text.endswith("rank 0: no GPU; rank 1: no GPU")


def test_another_package_of_that_name_is_refused() -> None:
    with (
        mock.patch.dict(sys.modules, {"deep_ep": types.ModuleType("deep_ep")}),
        mock.patch.object(torch.cuda, "is_available", return_value=True),
    ):
        assert deep_ep.unavailable() == "package deep_ep has no class Buffer"


def _choose_alone(rank: int) -> None:
    with mock.patch.object(deep_ep, "unavailable", return_value=None):
        engines._choose(str(dist.group.WORLD.group_name), "deep_ep", "nccl", torch.bfloat16)


def test_three_ranks_are_refused() -> None:
    for _, text in expect_error_on_ranks(3, _choose_alone):
        assert "it has 3 ranks, not one of (2, 4, 8)" in text


def _set_up_on_gloo(rank: int) -> None:
    with mock.patch.dict(os.environ, {"MOE_OPS_ENGINE": "deep_ep"}):
        comm.setup(dist.group.WORLD, **SETUP)


def test_a_group_of_gloo_is_refused_by_the_variable_too() -> None:
    for _, text in expect_error_on_ranks(2, _set_up_on_gloo):
        assert "setup: engine 'deep_ep' cannot carry group" in text and "'gloo'" in text


@pytest.mark.parametrize(("obstacle", "chosen"), [(None, "nvlink"), ("no NVLink", "nccl")])
def test_auto_never_takes_it(obstacle: str | None, chosen: str) -> None:
    with (
        mock.patch.object(deep_ep, "obstacle", side_effect=AssertionError),
        mock.patch.object(nvlink, "obstacle", return_value=obstacle),
        mock.patch.object(engines, "group_rank", return_value=0),
        mock.patch.object(engines, "resolve", return_value=mock.Mock()),
    ):
        assert engines._choose("some", "auto", "nccl", torch.bfloat16) == chosen


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _plan(top_k: int) -> list[torch.Tensor]:
    shapes = ((5, 2), (7, 2), (7, top_k), (9,), (7, top_k), (4,), (2, 4), (2,), (4, 2))
    return [_empty(*shape, dtype=torch.int32) for shape in shapes]


@pytest.fixture
def _set_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deep_ep, "workspace", lambda group: SPACE if group == "fast" else None)
    monkeypatch.setattr(nvlink, "workspace", lambda group: None)


@pytest.mark.usefixtures("_set_up")
@pytest.mark.parametrize(
    ("group", "width", "dtype", "top_k", "taken"),
    [
        ("fast", 16, torch.bfloat16, 8, True),
        ("fast", 2048, torch.bfloat16, 32, True),
        ("fast", 24, torch.bfloat16, 8, False),
        ("fast", 2064, torch.bfloat16, 8, False),
        ("fast", 0, torch.bfloat16, 8, False),
        ("fast", 16, torch.float16, 8, False),
        ("fast", 16, torch.bfloat16, 33, False),
        ("slow", 16, torch.bfloat16, 8, False),
    ],
    ids=str,
)
def test_rows(group: str, width: int, dtype: torch.dtype, top_k: int, taken: bool) -> None:
    x, rows, plan = _empty(5, width, dtype=dtype), _empty(7, width, dtype=dtype), _plan(top_k)
    sent = kernels.name_of("dispatch", x, None, plan, group, "full")
    back = kernels.name_of("combine", rows, None, None, plan, group)
    assert [sent, back] == ["deep_ep" if taken else "reference"] * 2


@pytest.mark.usefixtures("_set_up")
def test_rows_fit_into_a_warps_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deep_ep, "workspace", lambda group: SPACE._replace(row_bytes=1 << 20))
    for width, wire, name in [(8176, "full", "deep_ep"), (8192, "full", "reference")]:
        assert kernels.name_of("dispatch", _empty(5, width), None, _plan(8), "", wire) == name
    assert kernels.name_of("dispatch", _empty(5, 8192), None, _plan(8), "", "fp8") == "deep_ep"
    assert kernels.name_of("dispatch", _empty(5, 16), None, _plan(8), "", "fp8") == "reference"


@pytest.mark.usefixtures("_set_up")
def test_exchanges_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks would time them one by one, while the others wait."""
    monkeypatch.setenv("MOE_OPS_AUTOTUNE", "1")
    args = _empty(5, 16), None, _plan(8), "fast", "full"
    with mock.patch.object(kernels.autotune, "tune", side_effect=AssertionError):
        kernels.choose("dispatch", *args)
