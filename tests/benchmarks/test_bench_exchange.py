"""The benchmark of exchanges runs on two processes without a GPU, times nothing that is wrong, and
calls its peers as these expect.
"""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from benchmarks import bench_exchange, specs_exchange
from benchmarks.bench_exchange import OPS, SHAPES, TINY, Bench
from benchmarks.specs_exchange import Candidate, Ranks, Tensors, capacity, differences
from moe_ops.ops.dispatch import combine, dispatch
from tests.ranks import run_on_ranks

ARGUMENTS = ["--shape", "tiny", "--repeats", "2", "--device", "cpu"]


@pytest.mark.dist
def test_command_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.json"
    arguments = [*ARGUMENTS, "--sms", "4", "--beside", "--json", str(path)]
    bench_exchange.run(bench_exchange.parse(arguments))
    content = json.loads(path.read_text())
    assert (content["ranks"], content["repeats"], content["torch"]) == (2, 2, torch.__version__)
    timed = [row for row in content["rows"] if not row["failure"]]
    assert [row["op"] for row in timed if row["backend"] == "gloo"] == list(OPS)
    assert [row["op"] for row in timed if row["backend"] == "stock"] == ["dispatch", "combine"]
    assert all(row["us"] > 0 for row in timed)
    failed = {row["backend"]: row["failure"] for row in content["rows"] if row["failure"]}
    assert set(failed) == {"nvlink, 4 SMs", "3 matmuls"}
    assert "setup: engine" in failed["nvlink, 4 SMs"]
    assert capfd.readouterr().out.count("plan + dispatch") == 1, "rank 0 alone prints"


def _bench(rank: int, *arguments: str) -> list[tuple[str, str, str, bool]]:
    args = bench_exchange.parse([*ARGUMENTS, *arguments])
    rows = bench_exchange.bench(Ranks("cpu"), args)
    return [(row.op, row.backend, row.failure, row.us is not None) for row in rows]


def _bench_without_deep_ep(rank: int) -> list[tuple[str, str, str, bool]]:
    with mock.patch.dict(sys.modules, {"deep_ep": None}):
        return _bench(rank, "--peers")


def test_missing_peer_is_a_row() -> None:
    first, second = run_on_ranks(2, _bench_without_deep_ep)
    assert first == second
    failures = {backend: failure for _, backend, failure, _ in first if failure}
    assert set(failures) == {"DeepEP"} and "deep_ep" in failures["DeepEP"]


class FakeBuffer:
    """What DeepEP V1 computes, and what it asks of its arguments."""

    lost_rows = 0

    def __init__(self, group: dist.ProcessGroup, num_nvl_bytes: int, num_rdma_bytes: int) -> None:
        assert num_nvl_bytes == 2 * TINY.hidden * 2 and num_rdma_bytes == 0
        self.group = group

    @staticmethod
    def set_num_sms(number: int) -> None:
        assert number % 2 == 0

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Any:
        return types.SimpleNamespace(get_nvl_buffer_size_hint=lambda hidden, ranks: hidden * ranks)

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(self, ids_TK: torch.Tensor, num_experts: int) -> tuple[Any, ...]:
        assert ids_TK.dtype == torch.int64
        ranks = torch.arange(2)
        hits_TKP = (ids_TK // (num_experts // 2))[:, :, None] == ranks
        sent_TP = hits_TKP.any(1)
        per_expert = torch.bincount(ids_TK.reshape(-1), minlength=num_experts).int()
        return sent_TP.sum(0).int(), None, per_expert, sent_TP, None

    def dispatch(
        self,
        x_TH: torch.Tensor,
        handle: Any = None,
        *,
        num_tokens_per_rank: Any = None,
        is_token_in_rank: Any = None,
        num_tokens_per_expert: Any = None,
        topk_idx: Any = None,
        topk_weights: torch.Tensor | None = None,
    ) -> tuple[Any, ...]:
        if handle is not None:
            assert topk_idx is None and topk_weights is None
            plan = handle
            ops = torch.ops.moe_ops
            name = str(self.group.group_name)
            return ops.dispatch(x_TH, None, plan.tensors(), name, "full")[0], *[None] * 5
        assert num_tokens_per_rank.dtype == torch.int32 and is_token_in_rank.dtype == torch.bool
        rows_DH, weights_DK, plan = dispatch(
            x_TH,
            topk_idx,
            topk_weights,
            num_experts=len(num_tokens_per_expert),
            group=self.group,
        )
        kept = len(rows_DH) - self.lost_rows
        return rows_DH[:kept], plan.ids_DK, weights_DK[:kept], [], plan, None

    def combine(
        self, rows_DH: torch.Tensor, handle: Any, topk_weights: torch.Tensor | None = None
    ) -> tuple[Any, ...]:
        x_TH, weights_TK = combine(rows_DH, handle, group=self.group, weights_DK=topk_weights)
        return x_TH, None if topk_weights is None else weights_TK, None


def _bench_with_fake(rank: int, lost_rows: int) -> list[tuple[str, str, str, bool]]:
    module: Any = types.ModuleType("deep_ep")
    module.Buffer = FakeBuffer
    with (
        mock.patch.dict(sys.modules, {"deep_ep": module}),
        mock.patch.object(FakeBuffer, "lost_rows", lost_rows),
    ):
        return _bench(rank, "--peers")


def test_deep_ep_is_called_as_it_expects() -> None:
    rows, _ = run_on_ranks(2, _bench_with_fake, 0)
    found = [(op, failure, timed) for op, name, failure, timed in rows if name == "DeepEP"]
    ours_alone = ("exchange_plan", "dispatch, fp8", "combine, addend", "combine, rows elsewhere")
    assert found == [(op, "", True) for op in OPS if op not in ours_alone]


def test_lost_row_of_a_peer_is_seen() -> None:
    rows, _ = run_on_ranks(2, _bench_with_fake, 1)
    failures = {op: failure for op, name, failure, _ in rows if name == "DeepEP"}
    assert "rows, not" in failures["plan + dispatch"] and failures["combine"]
    assert all(timed != bool(failure) for _, _, failure, timed in rows)


def _table_with_faults(rank: int) -> list[tuple[str, str, bool]]:
    bench = Bench(TINY, bench_exchange.parse(ARGUMENTS), Ranks("cpu"))
    right = bench.own.runs["combine"]
    calls = [0]

    def wrong() -> Tensors:
        x_TH, empty = right()
        x_TH[3, 5] += rank  # on rank 1 only
        return [x_TH, empty]

    def raises_later() -> Tensors:
        calls[0] += 1
        if calls[0] > 4:
            raise ValueError("broken")
        return right()

    runs = {"wrong": wrong, "later": raises_later}
    peers = [Candidate(name, {"combine": run}, bench.our_fault) for name, run in runs.items()]
    with mock.patch.object(specs_exchange, "ROUNDS", 3):
        bench.table([bench.own, *peers], ["combine"])
    return [(row.backend, row.failure, row.us is not None) for row in bench.rows]


def test_what_is_wrong_on_one_rank_gets_no_time_on_any() -> None:
    rows, others = run_on_ranks(2, _table_with_faults)
    assert rows == others
    assert [(name, timed) for name, _, timed in rows] == [
        ("gloo", True),
        ("wrong", False),
        ("later", False),
    ]
    assert "output 0 differs in 1 places, first [3, 5]" in rows[1][1]
    assert rows[2][1] == "ValueError: broken"


def test_differences_name_the_output() -> None:
    x = torch.arange(6).reshape(2, 3)
    changed = x.clone()
    changed[1, 2] = 9
    assert differences([x], [x.clone()]) == ""
    found = differences([x, changed, x], [x, x, x.float()])
    assert found == (
        "output 1 differs in 1 places, first [1, 2]: 9, not 5; output 2 is torch.int64 [2, 3]"
    )


def test_capacity() -> None:
    assert [capacity(most, 16384) for most in (1, 124, 8192, 16300)] == [128, 256, 8576, 16384]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_shapes_split_over_two_ranks(shape: Any) -> None:
    assert shape.num_experts % 2 == 0 and shape.top_k <= shape.num_experts


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="no GPU pair")
def test_exchange_on_two_gpus(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    arguments = ["--shape", "tiny", "small", "--repeats", "3", "--sms", "4", "--beside"]
    bench_exchange.run(bench_exchange.parse([*arguments, "--json", str(path)]))
    rows = json.loads(path.read_text())["rows"]
    assert not [row for row in rows if row["failure"]]
    assert {"nvlink, 14 SMs", "nvlink, 14 SMs, graph", "nccl"} <= {row["backend"] for row in rows}
