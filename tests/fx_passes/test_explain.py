"""The report on a model: what it says, against what compiling the model shows."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fx_passes
from fx_passes import journal
from fx_passes.cost_model import FixedCosts
from fx_passes.explain import explain
from fx_passes.fuse_swiglu import fuse_swiglu_pass
from fx_passes.journal import Decision, Journal
from fx_passes.report import Report
from fx_passes.timeline import EXCHANGE, EXPOSED
from moe_ops.nn import MoE, RouterConfig
from tests.ranks import run_on_ranks

from .compiled import BACKWARD, FORWARD, OFF, Backend, SavedBytes, make_layer, ops_of
from .graphs import trace

COSTS = FixedCosts({}, default=1e-6)


def tokens(layer: MoE, num_tokens: int = 11, requires_grad: bool = True) -> torch.Tensor:
    shape = num_tokens, layer.config.hidden_size
    return torch.randn(shape, dtype=layer.experts.w13.dtype, requires_grad=requires_grad)


def decisions(report: Report, name: str) -> list[Decision]:
    return [d for d in report.journal.decisions if d.pass_name == name]


def test_report_tells_matches_and_graphs() -> None:
    layer = make_layer()
    report = explain(layer, tokens(layer), costs=COSTS)
    assert ops_of(report.after.graphs["forward"])[-len(FORWARD) :] == FORWARD
    assert ops_of(report.after.graphs["backward"])[: len(BACKWARD)] == BACKWARD
    assert "swiglu" in ops_of(report.before.graphs["forward"])
    assert report.journal.changes["fuse_swiglu"] == 2
    fused = decisions(report, "fuse_swiglu")
    assert [d.reason for d in fused] == [None, None]
    assert [d.match.partition("(")[0] for d in fused] == ["Forward", "Backward"]
    text = str(report)
    assert max(map(len, text.splitlines())) <= 100
    for line in (
        "    + Forward(matmul=grouped_mm, swiglu=swiglu)",
        "times: the cost model",
        "calls after the passes",
    ):
        assert line in text.splitlines()
    assert "  exposed in all                       0.0 us (0%)         0.0 us (0%)" in text


def test_report_tells_refusals() -> None:
    layer = make_layer(bias=True, activation="swiglu_clamped")
    report = explain(layer, tokens(layer), costs=COSTS)
    refused = [d for d in decisions(report, "fuse_swiglu") if d.reason]
    assert [d.reason for d in refused] == ["h comes from grouped_bias"]
    lines = str(report).splitlines()
    place = lines.index(f"    - {refused[0].match}")
    assert lines[place + 1] == "      h comes from grouped_bias"


def test_report_of_passes_that_are_off() -> None:
    layer = make_layer()
    report = explain(layer, tokens(layer), costs=COSTS, **OFF)
    assert not report.journal.decisions
    assert report.before.kept_bytes == report.after.kept_bytes > 0
    for kind, graph in report.before.graphs.items():
        assert ops_of(graph) == ops_of(report.after.graphs[kind])


@pytest.mark.parametrize("name", ["swiglu", "relu2"])
def test_kept_bytes_are_what_autograd_keeps(name: str) -> None:
    layer = make_layer(torch.float32, activation=name, ffn_hidden_size=64)
    x = tokens(layer, 32)
    report = explain(layer, x, costs=COSTS)
    for variant, overrides in ((report.before, OFF), (report.after, {})):
        function = Backend(**overrides).compile(layer)
        with SavedBytes(x, *layer.parameters(), *layer.buffers()) as saved:
            function(x)
        assert variant.kept_bytes == pytest.approx(saved.total, rel=0.02)
    assert report.after.kept_bytes < 0.7 * report.before.kept_bytes


def test_bytes_written_are_those_of_what_is_gone() -> None:
    module, _ = trace(lambda rows, w13, offsets, w2t: _mlp(rows, w13, offsets, w2t))
    found = Journal(lambda graph: len(graph.nodes))
    with journal.listening(found):
        assert fuse_swiglu_pass(module.graph) == 1
    assert journal.current() is None
    # A matmul and an activation become a call and two getitems.
    assert [(d.pass_name, d.reason, d.bytes_saved) for d in found.decisions] == [
        ("fuse_swiglu", None, -1)
    ]


def _mlp(rows, w13, offsets, w2t):
    ops = torch.ops.moe_ops
    h = ops.grouped_mm(rows, w13, offsets)
    return ops.swiglu(h, None, offsets, "silu", None, 1.0, 0.0)


def test_model_inputs_and_random_numbers_stay_as_they_are() -> None:
    router = RouterConfig(balancing=("aux",), aux_loss_coeff=0.1, jitter_eps=0.1)
    layer = make_layer(router=router)
    x = tokens(layer)
    layer(x).sum().backward()
    state = copy.deepcopy(layer.state_dict())
    stats, grads = layer.stats(), [p.grad.clone() for p in (x, *layer.parameters())]
    random = torch.get_rng_state()
    explain(layer, x, costs=COSTS)
    assert torch.equal(torch.get_rng_state(), random)
    for name, value in layer.state_dict().items():
        assert torch.equal(value, state[name]), name
    for name, value in layer.stats().items():
        assert torch.equal(value, stats[name]), name
    for grad, kept in zip((x.grad, *(p.grad for p in layer.parameters())), grads):
        assert torch.equal(grad, kept)
    assert layer.losses["aux"].requires_grad


@pytest.mark.parametrize("how", ["wrapped", "in place"])
def test_compiled_models_are_explained_anew(how: str) -> None:
    layer = make_layer()
    compiled = torch.compile(layer, backend=_no_compiler)
    if how == "in place":
        layer.compile(backend=_no_compiler)
        compiled = layer
    report = explain(compiled, tokens(layer), costs=COSTS)
    assert report.journal.changes["fuse_swiglu"] == 2
    assert layer.ids_TK is None, "the copy runs, not the model"


def _no_compiler(graph: Any, inputs: Any) -> Any:
    raise AssertionError("the model's own compiler must not run")


def test_no_backward_without_gradients() -> None:
    layer = make_layer().eval().requires_grad_(False)
    report = explain(layer, tokens(layer, requires_grad=False), costs=COSTS)
    assert report.after.graphs.keys() == report.after.events.keys() == {"forward"}
    assert report.after.kept_bytes == 0
    assert "backward" not in report.text.replace("kept for backward", "")


def test_functions_and_other_sizes() -> None:
    for size in (4, 6):
        x = torch.randn(size, requires_grad=True)
        graphs = explain(lambda x: (x.sin(), {"y": x.cos()}), x, costs=COSTS).after.graphs
        placeholder = next(iter(graphs["forward"].nodes))
        assert tuple(placeholder.meta["val"].shape) == (size,)
        assert "backward" in graphs


def test_rejects_what_does_not_compile_as_a_whole() -> None:
    def broken(x):
        torch._dynamo.graph_break()
        return x + 1

    with pytest.raises(
        RuntimeError, match="explain: model must compile with fullgraph=True, got Unsupported"
    ):
        explain(broken, torch.ones(2))


class _Refusing(torch.nn.Module):
    def forward(self, x):
        if len(x) != 3:
            raise KeyError(f"x must have 3 rows, got {len(x)}")
        return x @ torch.ones(3, 3)


@pytest.mark.parametrize(
    ("model", "x", "error"),
    [
        (make_layer(), torch.ones(4, 6), "ValueError: MoE: x must have shape .* got \\(4, 6\\)"),
        (_Refusing(), torch.ones(2, 3), "KeyError: 'x must have 3 rows, got 2'"),
        (_Refusing(), torch.ones(3, 2), "RuntimeError: .*2"),
    ],
    ids=["layer", "error", "shapes"],
)
def test_tells_the_errors_of_the_model(model: Any, x: torch.Tensor, error: str) -> None:
    with pytest.raises(RuntimeError, match=f"explain: model must run on .* got {error}") as raised:
        explain(model, x)
    assert type(raised.value.__cause__).__name__ == error.partition(":")[0]


def test_rejects_unknown_settings_and_measuring_without_a_gpu() -> None:
    with pytest.raises(ValueError, match="settings must be among"):
        explain(torch.nn.Identity(), torch.ones(2), fuse_all=True)
    with pytest.raises(ValueError, match="measured must be left out without a GPU, got True"):
        explain(torch.nn.Identity(), torch.ones(2), measured=True)


SECONDS = {"dispatch": 6e-6, "combine": 6e-6, "exchange_plan": 1e-6}
SECONDS |= {f"{op}_start": SECONDS[op] for op in ("dispatch", "combine")}


def _explain_on_rank(rank: int) -> tuple[dict[str, list[Any]], str]:
    layer = make_layer(torch.float32, group=dist.group.WORLD, shared_ffn_hidden_size=4)
    report = explain(layer, tokens(layer, 9 + rank), costs=FixedCosts(SECONDS, default=1e-6))
    names = {}
    for kind, events in report.before.events.items():
        names[kind] = [(e.name, e.seconds) for e in events if e.lane == EXCHANGE]
    before, after = report.before.seconds(EXPOSED), report.after.seconds(EXPOSED)
    assert before == pytest.approx(25e-6), "a whole exchange hides nothing"
    assert report.after.seconds(EXCHANGE) == pytest.approx(25e-6)
    assert 0 < after < before
    return names, report.text


@pytest.mark.dist
def test_exchanges_on_two_ranks() -> None:
    for names, text in run_on_ranks(2, _explain_on_rank, timeout_s=240):
        plan = ("exchange_plan", 1e-6)
        there_and_back = [("dispatch", 6e-6), ("combine", 6e-6)]
        assert names == {"forward": [plan, *there_and_back], "backward": there_and_back}
        assert "  split_exchange                                 4" in text
        assert "dispatch_start" in text


@pytest.mark.gpu
def test_measures_on_gpu() -> None:
    layer = make_layer(torch.bfloat16, "cuda", hidden_size=256, ffn_hidden_size=128)
    x = torch.randn(200, 256, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    report = explain(layer, x)
    assert report.source == torch.cuda.get_device_name()
    for variant in (report.before, report.after):
        assert variant.events.keys() == {"forward", "backward"}
        assert variant.span > 0
    assert explain(layer, x, measured=False).source == "the cost model"


def test_is_exported() -> None:
    assert fx_passes.explain is explain
    assert fx_passes.Report is Report
