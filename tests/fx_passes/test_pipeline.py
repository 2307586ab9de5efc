"""The seam that passes plug into: options(), its errors, and the compile caches behind it."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

import fx_passes
from fx_passes import pipeline

from .compiled import JOINT, OFF, PRE_GRAD
from .compiled import POST_GRAD as HOOK

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++"))), reason="no compiler for Inductor's C++"
)


@pytest.fixture
def empty_cache() -> Iterator[None]:
    with fresh_cache():
        yield
    torch._dynamo.reset()


def compile_and_run() -> torch.Tensor:
    """Compile from nothing, as a new process would, and return the gradient."""
    torch._dynamo.reset()
    counters.clear()
    x = torch.linspace(-1, 1, 8).requires_grad_()
    step = torch.compile(lambda x: (x * x.sigmoid()).sum(), options=fx_passes.options())
    step(x).backward()
    return x.grad


def cache_hits() -> int:
    return counters["aot_autograd"]["autograd_cache_hit"]


def test_empty_pipeline_installs_one_composite() -> None:
    options = fx_passes.options(**OFF)
    assert options.keys() == {HOOK}
    assert options[HOOK].passes == ()


def test_passes_run_in_order() -> None:
    options = fx_passes.options()
    names = {hook: list(map(pipeline.name_of_pass, options[hook].passes)) for hook in options}
    assert names == {
        PRE_GRAD: ["fuse_permute_all_to_all"],
        JOINT: ["protect_exchange", "recompute_rows", "recompute_activation"],
        HOOK: [
            *("fuse_swiglu", "fold_permute_grouped_mm", "place_in_window", "split_exchange"),
            *("interleave_exchanges", "overlap_shared_experts", "defer_wgrad", "lower"),
            "pin_order",
        ],
    }


@pytest.mark.parametrize("name", OFF)
def test_each_pass_has_a_switch(name: str) -> None:
    on, off = fx_passes.options(**{**OFF, name: True}), fx_passes.options(**{name: False})
    alone = [run for hook in on for run in on[hook].passes]
    others = [run for hook in off for run in off[hook].passes]
    assert alone and others and not set(alone) & set(others)
    assert len({fx_passes.options()[HOOK].uuid(), on[HOOK].uuid(), off[HOOK].uuid()}) == 3


def test_chunks_are_counted() -> None:
    (chunk,) = fx_passes.options(**OFF, chunk_exchange=3)[PRE_GRAD].passes
    assert pipeline.name_of_pass(chunk) == "chunk_exchange"
    assert {field.name for field in dataclasses.fields(fx_passes.PassConfig)} == {
        *OFF,
        *("chunk_exchange", "num_comm_sms", "expected_rows", "cost_model"),
    }


def test_exchanges_run_on_so_many_multiprocessors() -> None:
    only = {**OFF, "split_exchange": True}
    (default, _), (split, _) = (
        fx_passes.options(**only, num_comm_sms=number)[HOOK].passes for number in (None, 8)
    )
    assert pipeline.name_of_pass(split) == "split_exchange"
    assert (default.keywords, split.keywords) == ({"num_sms": 0}, {"num_sms": 8})


def test_equal_settings_give_equal_options() -> None:
    assert fx_passes.options() == fx_passes.options(fx_passes.PassConfig())


@needs_compiler
def test_compile_cache_holds_until_sources_change(
    empty_cache: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = compile_and_run()
    assert cache_hits() == 0
    second = compile_and_run()
    assert cache_hits() == 1
    assert counters["aot_autograd"]["autograd_cache_bypass"] == 0
    assert counters["inductor"]["fxgraph_cache_bypass"] == 0
    torch.testing.assert_close(first, second, rtol=0, atol=0)

    for module, name in ((pipeline, "_source_hash"), (pipeline._library, "source_hash")):
        monkeypatch.setattr(module, name, lambda: "another version")
        compile_and_run()
        assert cache_hits() == 0, name


@pytest.mark.parametrize("name", ["chunk_exchange", "num_comm_sms"])
def test_uuid_covers_settings(name: str) -> None:
    uuids = {fx_passes.options(**{name: n})[HOOK].uuid() for n in (1, 1, 2)}
    assert len(uuids) == 2


def test_composite_runs_passes_in_order_and_lints() -> None:
    graph = torch.fx.symbolic_trace(lambda x: x + 1).graph
    seen: list[str] = []

    def record(name: str, graph: torch.fx.Graph) -> int:
        seen.append(name)
        return 0

    def orphan(graph: torch.fx.Graph) -> int:
        stray = torch.fx.Graph().placeholder("stray")
        next(n for n in graph.nodes if n.op == "call_function").args = (stray, 1)
        return 1

    def composite(*passes: pipeline.Pass) -> pipeline.CompositePass:
        return pipeline.CompositePass(hook=HOOK, passes=passes, config=fx_passes.PassConfig())

    composite(lambda g: record("a", g), lambda g: record("b", g))(graph)
    assert seen == ["a", "b"]
    with pytest.raises(RuntimeError, match="stray"):
        composite(orphan)(graph)


def test_merges_inductor_options() -> None:
    options = fx_passes.options(inductor={"max-autotune": True, "joint_custom_pre_pass": None})
    rest = {"max_autotune", "joint_custom_pre_pass"}
    assert options.keys() == {PRE_GRAD, JOINT, HOOK, *rest}


@pytest.mark.parametrize("name", [HOOK, HOOK.replace("_", "-")])
def test_rejects_hook_set_twice(name: str) -> None:
    with pytest.raises(ValueError, match=f"must leave {HOOK} to fx_passes, got 'mine'"):
        fx_passes.options(inductor={name: "mine"})
