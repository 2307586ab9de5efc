"""The benchmarks of stacks and of compilation run without a GPU, and time nothing that is wrong."""

from __future__ import annotations

from unittest import mock

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks import bench_compile, bench_stack
from benchmarks.specs_exchange import Ranks
from tests.ranks import run_on_ranks

ARGUMENTS = ["--shape", "tiny", "--repeats", "1", "--heat", "1", "--device", "cpu"]


def _bench(rank: int, limit: float) -> list[tuple[str, str, str, bool]]:
    arguments = [*ARGUMENTS, "--model", "layer", "--variant", "stock"]
    with mock.patch.object(bench_stack, "LIMIT", limit):
        rows = bench_stack.bench(Ranks("cpu"), bench_stack.parse(arguments))
    return [(row.op, row.backend, row.failure, row.us is not None) for row in rows]


@pytest.mark.dist
def test_stock_layer_is_timed_if_it_is_right() -> None:
    for rows in run_on_ranks(2, _bench, bench_stack.LIMIT):
        assert rows == [("layer", "stock", "", True)]
    for ((_, _, failure, is_timed),) in run_on_ranks(2, _bench, 1e-9):
        assert "errors are" in failure and not is_timed


def test_layer_of_many_ranks_is_traced() -> None:
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        assert bench_compile.seconds(lambda: bench_compile.trace_layer(4)) > 0
    finally:
        dist.destroy_process_group()
