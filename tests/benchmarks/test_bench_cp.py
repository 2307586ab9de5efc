"""The benchmark of shared attention runs without a GPU, and times nothing that is wrong."""

from __future__ import annotations

from unittest import mock

import pytest

from benchmarks import bench_cp
from benchmarks.specs_exchange import Ranks
from tests.ranks import run_on_ranks

ARGUMENTS = ["--tokens", "16", "--heads", "4", "--kv-heads", "2", "--size", "8", "--repeats", "1"]


def _bench(rank: int, limit: float) -> list[tuple[str, str, bool]]:
    with mock.patch.object(bench_cp, "LIMIT", limit):
        rows = bench_cp.bench(Ranks("cpu"), bench_cp.parse([*ARGUMENTS, "--device", "cpu"]))
    return [(row.backend, row.failure, "scaling" in row.extra) for row in rows]


@pytest.mark.dist
def test_rings_are_timed_if_they_are_right() -> None:
    for rows in run_on_ranks(2, _bench, bench_cp.LIMIT):
        assert rows == [("one GPU", "", False), ("ring", "", True), ("ring compiled", "", True)]
    for _, *rings in run_on_ranks(2, _bench, -1.0):
        assert all("error is" in failure and not is_timed for _, failure, is_timed in rings)
