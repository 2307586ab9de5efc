"""The benchmarks run on the CPU, refuse wrong results, and feed their peers what these expect."""

from __future__ import annotations

import json
import math
import os
import types
from pathlib import Path
from unittest import mock

import pytest
import torch

from benchmarks import bench_layer, bench_ops, peers, specs_matmul, time_kernels, workloads
from benchmarks.harness import Backend, Harness, Row, Timing, Work, compare, fill, line
from benchmarks.workloads import ALIGNMENT, ROUTINGS, SHAPES, TINY, Scene
from moe_ops import _library, kernels

MATMULS = [
    spec for spec in bench_ops.SPECS if spec.startswith(("grouped_mm/", "grouped_mm_wgrad/"))
]
# Not on the way of the layers measured here.
WITHOUT_SPEC = {"sort_chunks", "grouped_bias", "grouped_bias_backward"}


def work_of(*backends: Backend, error: float = 0.0) -> Work:
    return Work(
        op="op",
        shape="tiny",
        routing="random",
        backends=backends,
        error_of=lambda result: error if result is None else result,
        limit=1e-3,
        num_bytes=1000,
    )


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("spec", bench_ops.SPECS)
def test_spec_is_right_and_timed(spec: str, routing: str) -> None:
    work = bench_ops.SPECS[spec](Scene(TINY, routing, "cpu"), peers.Peers())
    ours, *others = Harness("cpu", repeats=2).rows_of(work)
    assert (ours.op, ours.backend, ours.failure) == (spec, "moe_ops", "")
    assert ours.kernel == "reference"
    assert ours.us is not None and ours.us > 0 and ours.rate is not None
    assert others and all(not row.failure for row in others), others


@pytest.mark.parametrize("op", sorted(_library.OPS))
def test_local_op_has_a_spec(op: str) -> None:
    exchanges = "group_name" in _library.OPS[op].schema
    if not exchanges and op not in WITHOUT_SPEC:
        assert any(spec.partition("/")[0] == op for spec in bench_ops.SPECS)


def test_wrong_result_gets_no_time() -> None:
    rows = Harness("cpu", repeats=2).rows_of(
        work_of(
            Backend("moe_ops", lambda: 1e-4),
            Backend("inexact", lambda: 1e-2),
            Backend("nan", lambda: math.nan),
            Backend("raises", lambda: 1 / 0),
            Backend("viewed", lambda: 5.0, lambda result: 0.0),
        )
    )
    assert [bool(row.failure) for row in rows] == [False, True, True, True, False]
    assert [row.us is None for row in rows] == [False, True, True, True, False]
    assert "ZeroDivisionError" in rows[3].failure
    assert rows[0].ratio == pytest.approx(rows[4].us / rows[0].us)
    assert all(line(row).startswith("op") for row in rows)


def test_rates_and_ratio() -> None:
    rows = [
        Row(op="m", shape="s", routing="r", backend=name) for name in ("moe_ops", "slow", "fast")
    ]
    for row, us in zip(rows, (50.0, 200.0, 100.0)):
        fill(row, Timing(us, 0.1), num_flops=7_560_000_000)
    assert rows[0].rate == pytest.approx(151.2) and rows[0].roofline == pytest.approx(0.2)
    compare(rows, {"moe_ops"})
    assert rows[0].ratio == pytest.approx(2.0) and rows[2].ratio is None
    fill(rows[0], Timing(50.0, 0.1), num_bytes=50_000_000)
    assert rows[0].rate == pytest.approx(1000.0) and rows[0].unit == "GB/s"


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_shapes_can_be_aligned(shape: object) -> None:
    assert shape.num_rows % ALIGNMENT == 0 and shape.top_k <= shape.num_experts


@pytest.mark.parametrize("routing", ROUTINGS)
def test_routing_is_what_it_says(routing: str) -> None:
    scene = Scene(TINY, routing, "cpu")
    assert (scene.ids_TK.sort(1).values.diff(dim=1) > 0).all(), "a token's experts are distinct"
    assert sum(scene.counts) == TINY.num_rows
    if routing == "aligned":
        assert all(count % ALIGNMENT == 0 for count in scene.counts)
    if routing == "zipf":
        assert scene.counts[0] > 2 * scene.counts[-1]


class FakeDeepGemm(types.SimpleNamespace):
    """What DeepGEMM computes, and what it asks of its arguments."""

    def m_grouped_bf16_gemm_nt_contiguous(
        self, a: torch.Tensor, b: torch.Tensor, d: torch.Tensor, expert: torch.Tensor
    ) -> None:
        assert a.is_contiguous() and expert.dtype == torch.int32 and len(expert) == len(a)
        for block in expert.split(ALIGNMENT):
            assert len(block) == ALIGNMENT and len(block[block >= 0].unique()) == 1
        for row, number in enumerate(expert.tolist()):
            d[row] = b[number] @ a[row] if number >= 0 else math.nan

    def m_grouped_bf16_gemm_nn_contiguous(
        self, a: torch.Tensor, b: torch.Tensor, d: torch.Tensor, expert: torch.Tensor
    ) -> None:
        assert b.is_contiguous()
        self.m_grouped_bf16_gemm_nt_contiguous(a, b.mT, d, expert)

    def k_grouped_bf16_gemm_tn_contiguous(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        d: torch.Tensor,
        ks: list[int],
        *others: torch.Tensor,
    ) -> None:
        sizes, c = others
        assert sizes.tolist() == ks and c is d and d.dtype == torch.float32
        assert all(size % ALIGNMENT == 0 for size in ks) and sum(ks) == len(a) == len(b)
        for out, part_a, part_b in zip(d, a.split(ks), b.split(ks)):
            out += part_a.float().T @ part_b.float()


@pytest.mark.parametrize("routing", ["aligned", "random"])
@pytest.mark.parametrize("spec", MATMULS)
def test_deep_gemm_gets_its_padded_groups(spec: str, routing: str) -> None:
    found = peers.Peers()
    found.deep_gemm = FakeDeepGemm()
    work = bench_ops.SPECS[spec](Scene(TINY, routing, "cpu"), found)
    backend = work.backends[-1]
    assert ("padding copy" in backend.name) == (routing == "random")
    assert work.error_of(backend.view(backend.run())) < work.limit


@pytest.mark.parametrize("matmul", workloads.MATMULS + workloads.WGRADS)
def test_deep_gemm_kernels_can_be_warmed(matmul: str) -> None:
    """On the operands that the matmul's spec draws from the same seed."""
    spec = f"grouped_mm/{matmul}".replace("/wgrad_", "_wgrad/")
    work = bench_ops.SPECS[spec](Scene(TINY, "random", "cpu"), peers.Peers())
    scene = Scene(TINY, "random", "cpu")
    backend = specs_matmul.deep_gemm_backend(FakeDeepGemm(), scene, matmul)
    assert work.error_of(backend.view(backend.run())) < work.limit


def test_moe_ops_peer_maps_rows_of_choices() -> None:
    scene = Scene(TINY, "random", "cpu")
    x_TH, (slot_of_row_C, row_of_slot_TK, _) = scene.tokens(), scene.maps
    # Its own order of rows: ours, turned around.
    row_of_choice = (TINY.num_rows - 1 - row_of_slot_TK).T.reshape(-1)
    rows_CH = x_TH[(slot_of_row_C // TINY.top_k).long()]
    fake = types.SimpleNamespace(permute=lambda *args, E: (rows_CH.flip(0), row_of_choice, None))
    backend = peers.moe_ops_permute(fake, scene, x_TH)
    assert backend.view(backend.run()).equal(rows_CH)


def test_missing_peer_is_reported() -> None:
    found = peers.Peers("SonicMoE", "DeepGEMM")
    for name, module in (("SonicMoE", found.sonic), ("DeepGEMM", found.deep_gemm)):
        assert (module is None) == (name in found.missing)
    assert peers.Peers().missing == {}


def test_command_line_of_ops(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.json"
    arguments = ["--op", "permute", "grouped_mm", "--shape", "tiny", "--repeats", "2"]
    bench_ops.run(bench_ops.parse([*arguments, "--device", "cpu", "--json", str(path)]))
    content = json.loads(path.read_text())
    assert {row["op"] for row in content["rows"]} >= {"permute", "grouped_mm/fc2"}
    assert content["torch"] == torch.__version__ and content["commit"] and content["source"]
    assert "permute" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"--op must be among .*, got nothing"):
        bench_ops.run(bench_ops.parse(["--op", "nothing"]))


def test_default_plan_has_every_spec_and_shape() -> None:
    items = list(bench_ops.plan(bench_ops.parse([])))
    assert {spec for item in items for spec in item.specs} == set(bench_ops.SPECS)
    assert {item.shape.name for item in items} == set(SHAPES)
    assert {item.routing for item in items} == set(ROUTINGS)
    quick = list(bench_ops.plan(bench_ops.parse(["--quick"])))
    assert [(item.shape.name, item.routing) for item in quick] == [("Qwen3", "random")]


def test_layer_variants_agree(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    arguments = ["--shape", "tiny", "--variant", "eager", "stock", "--repeats", "2", "--profile"]
    rows = bench_layer.run(bench_layer.parse([*arguments, "--device", "cpu", "--json", str(path)]))
    assert [(row.op, row.backend) for row in rows] == [
        (op, name) for op in ("layer", "layer forward") for name in ("eager", "stock")
    ]
    assert all(row.us and not row.failure and row.error < bench_layer.LIMIT for row in rows)
    assert len(json.loads(path.read_text())["rows"]) == 4


def test_layer_oracle_sees_a_wrong_gradient() -> None:
    moe = bench_layer.make_layer(TINY, "cpu")
    scene = Scene(TINY, "random", "cpu")
    x_TH, grad_TH = scene.tokens().requires_grad_(), scene.tokens()
    oracle = bench_layer.Oracle.of(moe, x_TH, grad_TH)
    right = bench_layer.candidate("eager", moe, TINY, peers.Peers())
    halved = bench_layer.Candidate(
        "halved", lambda x: moe(x) * 0.5 + moe(x).detach() * 0.5, right.leaves, right.grads
    )
    assert max(oracle.errors(bench_layer.Step(right, x_TH, grad_TH)).values()) < 1e-2
    errors = oracle.errors(bench_layer.Step(halved, x_TH, grad_TH))
    assert errors["y"] < 1e-2
    assert all(errors[name] > 0.4 for name in ("grad_x", "grad_router", "grad_w13", "grad_w2"))


def test_layer_oracle_checks_y_and_grad_x_of_others() -> None:
    moe = bench_layer.make_layer(TINY, "cpu")
    scene = Scene(TINY, "random", "cpu")
    x_TH, grad_TH = scene.tokens().requires_grad_(), scene.tokens()
    stock = bench_layer.candidate("stock", moe, TINY, peers.Peers())
    errors = bench_layer.Oracle.of(moe, x_TH, grad_TH).errors(
        bench_layer.Step(stock, x_TH, grad_TH)
    )
    assert set(errors) == {"y", "grad_x"}


def test_kernels_are_timed_case_by_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MOE_OPS_TIMINGS", "")  # so that it is as before afterwards
    tune = mock.Mock(return_value={"slow": 20.4, "fast": 3.0})
    monkeypatch.setattr(kernels, "tune", tune)
    path = str(tmp_path / "timings.json")
    arguments = ["--out", path, "--shape", "tiny", "--device", "cpu"]
    time_kernels.run(time_kernels.parse(arguments))
    assert os.environ["MOE_OPS_TIMINGS"] == path

    hidden, ffn, experts, rows = TINY.hidden, TINY.ffn, TINY.num_experts, TINY.num_rows
    cases = [
        (call.args[0], *(tuple(x.shape) for x in call.args[1:] if isinstance(x, torch.Tensor)))
        for call in tune.call_args_list
    ]
    assert cases == [
        ("sort_slots", (TINY.num_tokens, TINY.top_k)),
        ("grouped_mm", (rows, hidden), (experts, 2 * ffn, hidden), (experts,)),
        ("grouped_mm", (rows, ffn), (experts, hidden, ffn), (experts,)),
        ("grouped_mm", (rows, 2 * ffn), (experts, hidden, 2 * ffn), (experts,)),
        ("grouped_mm", (rows, hidden), (experts, ffn, hidden), (experts,)),
        ("grouped_mm_wgrad", (rows, 2 * ffn), (rows, hidden), (experts,)),
        ("grouped_mm_wgrad", (rows, hidden), (rows, ffn), (experts,)),
    ]
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == len(cases)
    assert all(line.endswith("  fast 3 us  slow 20 us") for line in printed)


@pytest.mark.gpu
def test_ops_and_layer_on_the_gpu() -> None:
    arguments = ["--shape", "tiny", "--repeats", "3", "--heat", "0.01"]
    rows = bench_ops.run(bench_ops.parse([*arguments, "--routing", "random", "aligned"]))
    assert all(not row.failure for row in rows if row.backend == "moe_ops"), rows
    names = kernels.table()
    assert all(
        row.kernel in names[row.op.partition("/")[0]] for row in rows if row.backend == "moe_ops"
    )
    rows = bench_layer.run(bench_layer.parse([*arguments, "--variant", "eager", "stock"]))
    assert all(not row.failure for row in rows) and rows[0].extra["saved"] > 0
