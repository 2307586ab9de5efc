"""A layer in chunks of its tokens: the same values, one exchange a chunk."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fx_passes
import moe_ops
from moe_ops.nn import RouterConfig
from tests.ranks import run_on_ranks

from .compiled import OFF, Backend, make_layer, ops_of, step
from .test_pipeline import needs_compiler

EXCHANGES = ("exchange_plan", "dispatch", "combine")
LAYERS: dict[str, dict[str, Any]] = {
    "exact": {},
    "capacity": {"size_mode": "capacity", "max_tokens": 13},
    "tight": {"size_mode": "capacity", "max_tokens": 13, "copy_capacity": 22, "row_capacity": 44},
    "shared": {"shared_ffn_hidden_size": 5, "bias": True},
    "late weights": {"weights_at": "unpermute"},
}


@contextlib.contextmanager
def _listening() -> Iterator[list[str]]:
    """What the pass says within the block."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    handler.addFilter(lambda record: record.getMessage().startswith("chunk_exchange"))
    log = logging.getLogger("fx_passes.graph")
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    try:
        yield said
    finally:
        log.removeHandler(handler)


def _chunked(
    rank: int, fields: dict[str, Any], num_chunks: int, rest: dict[str, bool]
) -> tuple[list[list[str]], str]:
    """Exchanges of the forward and of the backward graph, and what the pass said."""
    layer = make_layer(group=dist.group.WORLD, dispatcher="flex", **fields)
    backend = Backend(**{**rest, "chunk_exchange": num_chunks})
    num_tokens = 11 + rank
    with _listening() as said:
        found = step(layer, backend.compile(layer, dynamic=False), num_tokens)
    for name, value in step(layer, layer, num_tokens).items():
        torch.testing.assert_close(found[name], value)
    graphs = [*backend.forward, *backend.backward]
    exchanges = [[op for op in ops_of(graph) if op in EXCHANGES] for graph in graphs]
    return exchanges, "\n".join(said)


@pytest.mark.parametrize(
    ("name", "num_chunks"), [*((name, 3) for name in LAYERS), ("exact", 2), ("capacity", 11)]
)
def test_values_and_gradients_stay(name: str, num_chunks: int) -> None:
    for (forward, backward), said in run_on_ranks(2, _chunked, LAYERS[name], num_chunks, OFF):
        assert sorted(forward) == sorted(num_chunks * EXCHANGES)
        assert sorted(backward) == sorted(num_chunks * EXCHANGES[1:])
        assert "rewrote exchange_plan" in said


def _through_inductor(rank: int) -> None:
    layer = make_layer(torch.float32, group=dist.group.WORLD)
    options = fx_passes.options(chunk_exchange=2)
    compiled = torch.compile(layer, fullgraph=True, dynamic=False, options=options)
    found = step(layer, compiled, 11 + rank)
    for name, value in step(layer, layer, 11 + rank).items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)


@needs_compiler
def test_chunks_have_sizes_of_their_own() -> None:
    """Inductor takes what the graph says of unknown sizes at its word."""
    run_on_ranks(2, _through_inductor, timeout_s=300)


def test_with_the_other_passes_one_chunk_runs_under_anothers_exchange() -> None:
    for (forward, _), _ in run_on_ranks(2, _chunked, LAYERS["exact"], 2, {"lower": False}):
        assert forward == ["exchange_plan"] * 2


REFUSALS: dict[str, tuple[dict[str, Any], int, str]] = {
    "too few": ({}, 20, "there are 1[12] tokens for 20 chunks"),
    "expert capacity": (
        {
            "router": RouterConfig(expert_capacity_factor=1.5, pad_to_capacity=True),
            "max_tokens": 12,
        },
        2,
        "sort_slots.* limits each expert's rows of all tokens",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refuses(name: str) -> None:
    fields, num_chunks, reason = REFUSALS[name]
    for graphs, said in run_on_ranks(2, _chunked, fields, num_chunks, OFF):
        assert [len(graph) for graph in graphs] == [3, 2]
        assert re.search(f"left .* alone: {reason}", said), said


def test_refuses_values_of_all_tokens() -> None:
    """What reads the plan beside the exchange, or the tokens within."""
    for said in run_on_ranks(2, _other_layers):
        assert "left exchange_plan_default to combine_default alone: " in said[0]
        assert said[0].endswith("a value that is made with the plan is an output")
        assert said[1].endswith("reads l_x_, of all tokens")
        assert said[2].endswith("the number of tokens is not known")


def _other_layers(rank: int) -> list[str]:
    ids_TK = torch.tensor([[0, 1], [2, 3], [1, 2]])
    x_TH = torch.randn(3, 4)
    group = dist.group.WORLD

    def plan_is_read(x: torch.Tensor, ids: torch.Tensor) -> Any:
        rows_DH, _, plan = moe_ops.dispatch(x, ids, num_experts=4, group=group)
        return moe_ops.combine(rows_DH, plan, group=group)[0], plan.offsets_L

    def tokens_are_read(x: torch.Tensor, ids: torch.Tensor) -> Any:
        rows_DH, _, plan = moe_ops.dispatch(x, ids, num_experts=4, group=group)
        return moe_ops.combine(torch.nn.functional.linear(rows_DH, x), plan, group=group)[0]

    def plain(x: torch.Tensor, ids: torch.Tensor) -> Any:
        rows_DH, _, plan = moe_ops.dispatch(x, ids, num_experts=4, group=group)
        return moe_ops.combine(rows_DH, plan, group=group)[0]

    said: list[str] = []
    for function, dynamic in ((plan_is_read, False), (tokens_are_read, False), (plain, True)):
        with _listening() as lines:
            backend = Backend(**{**OFF, "chunk_exchange": 2})
            backend.compile(function, dynamic=dynamic)(x_TH, ids_TK)
        said.append(lines[-1])
    return said
