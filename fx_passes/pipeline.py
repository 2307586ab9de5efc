"""The passes in order, each with its hook, and the Inductor options that install them."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
import os
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass

from moe_ops import _library
from moe_ops.comm import nvlink
from moe_ops.kernels import native

from .chunk_exchange import chunk_exchange_pass
from .config import PassConfig, config_of
from .cost_model import CostModel, cost_model
from .defer_wgrad import DeferWgrad, defer_wgrad_pass
from .fold_permute_grouped_mm import fold_permute_grouped_mm_pass, recompute_rows_pass
from .fuse_permute_all_to_all import fuse_permute_all_to_all_pass
from .fuse_swiglu import fuse_swiglu_pass, recompute_activation_pass
from .interleave_exchanges import interleave_exchanges_pass
from .journal import Journal, listening
from .lower import lower_pass
from .overlap_shared_experts import OverlapSharedExperts, overlap_shared_experts_pass
from .pin_order import pin_order_pass
from .place_in_window import place_in_window_pass
from .protect_exchange import protect_exchange_pass
from .split_exchange import split_exchange_pass
from .windows import bounds_of

_log = logging.getLogger(__name__)

_PRE_GRAD = "pre_grad_custom_pass"
_JOINT = "joint_custom_post_pass"
_POST_GRAD = "post_grad_custom_post_pass"
# Installed even without a pass: its uuid puts our sources into the keys of the compile caches.
_ALWAYS_INSTALLED = _POST_GRAD

Pass = Callable[[torch.fx.Graph], int]
"""Rewrites a graph in place and returns how many matches it rewrote."""


def options(
    config: PassConfig | str | os.PathLike[str] | None = None,
    *,
    inductor: Mapping[str, Any] | None = None,
    **overrides: Any,
) -> dict[str, Any]:
    """The `options=` of `torch.compile` that run the passes.

    Args:
        config: settings, or the path of a JSON file that holds some of them.
        inductor: further Inductor options, merged in.
        overrides: fields of `PassConfig`, which win over `config`.

    Raises:
        ValueError: a field that `PassConfig` does not have, a value that it does not take, or a
            hook that `inductor` sets as well.
    """
    hooks = _hooks(config_of(config, overrides))
    rest = {name.replace("-", "_"): value for name, value in (inductor or {}).items()}
    if taken := sorted(hooks.keys() & rest.keys()):
        raise ValueError(
            f"options: inductor must leave {', '.join(taken)} to fx_passes, got "
            f"{rest[taken[0]]!r}; run that pass on another hook"
        )
    return rest | hooks


def _passes(config: PassConfig) -> list[tuple[str, Pass]]:
    """(hook, pass with its options bound), in the order they run; every place has its reason."""
    passes: list[tuple[bool, str, Pass]] = [
        # Before autograd, whose backward is then of the fused exchange; first, since the other
        # passes know this exchange alone.
        (config.fuse_permute_all_to_all, _PRE_GRAD, fuse_permute_all_to_all_pass),
        # Before autograd, whose backward then comes in chunks, too.
        (config.chunk_exchange > 1, _PRE_GRAD, _chunk_exchange(config)),
        # Before the partitioner, which then runs no exchange again in backward.
        (config.protect_exchange, _JOINT, protect_exchange_pass),
        # Before the partitioner, too, which then keeps neither rows nor activations for backward.
        (config.fold_permute_grouped_mm, _JOINT, recompute_rows_pass),
        (config.fuse_swiglu, _JOINT, recompute_activation_pass),
        # Before folding, which knows the fused operators but cannot be undone to make them.
        (config.fuse_swiglu, _POST_GRAD, fuse_swiglu_pass),
        (config.fold_permute_grouped_mm, _POST_GRAD, fold_permute_grouped_mm_pass),
        # Before a combine is split, while it is one node.
        (config.lower, _POST_GRAD, place_in_window_pass),
        # After the fusions, so that nothing is fused across a start or a wait.
        (config.split_exchange, _POST_GRAD, _split_exchange(config)),
        # While nothing is in the windows that it moves.
        (config.interleave_exchanges, _POST_GRAD, interleave_exchanges_pass),
        # Between the halves, which must be there; first what has fewer places to go.
        (bool(config.overlap_shared_experts), _POST_GRAD, _overlap_shared_experts(config)),
        (bool(config.defer_wgrad), _POST_GRAD, _defer_wgrad(config)),
        # It looks at what the others leave.
        (config.lower, _POST_GRAD, lower_pass),
        # Last: what is pinned matches nothing.
        (config.split_exchange, _POST_GRAD, pin_order_pass),
    ]
    return [(hook, run) for on, hook, run in passes if on]


def _chunk_exchange(config: PassConfig) -> Pass:
    return _bind(chunk_exchange_pass, num_chunks=config.chunk_exchange)


def _split_exchange(config: PassConfig) -> Pass:
    return _bind(split_exchange_pass, num_sms=config.num_comm_sms or 0)


def _overlap_shared_experts(config: PassConfig) -> Pass:
    bounds = bounds_of(OverlapSharedExperts, config.overlap_shared_experts)
    return _bind(overlap_shared_experts_pass, costs=_costs(config), bounds=bounds)


def _defer_wgrad(config: PassConfig) -> Pass:
    bounds = bounds_of(DeferWgrad, config.defer_wgrad)
    return _bind(defer_wgrad_pass, costs=_costs(config), bounds=bounds)


def _costs(config: PassConfig) -> CostModel | None:
    """None: those of the device that is current when the passes run."""
    if config.cost_model is None and config.expected_rows is not None:
        return cost_model(expected_rows=config.expected_rows)
    return config.cost_model


@functools.cache
def _bind(run: Pass, **options: Any) -> Pass:
    """The same object for the same options, so that equal settings give equal passes."""
    return functools.partial(run, **options)


def _hooks(config: PassConfig) -> dict[str, Any]:
    passes_of_hook: dict[str, list[Pass]] = {_ALWAYS_INSTALLED: []}
    for hook, run in _passes(config):
        passes_of_hook.setdefault(hook, []).append(run)
    return {
        hook: CompositePass(hook=hook, passes=tuple(passes), config=config)
        for hook, passes in passes_of_hook.items()
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompositePass(CustomGraphPass):
    """All passes of one hook as one: torch 2.11 takes no list of them."""

    hook: str
    passes: tuple[Pass, ...]
    config: PassConfig
    journal: Journal | None = dataclasses.field(default=None, repr=False, compare=False)

    def __call__(self, graph: torch.fx.Graph) -> None:
        """Run the passes in order and check the graph they leave."""
        for run in self.passes:
            start, name = time.perf_counter(), name_of_pass(run)
            with listening(self.journal, name):  # here: backward is compiled in another thread
                count = run(graph)
            took_ms = 1e3 * (time.perf_counter() - start)
            _log.debug("%s: %s changed %d in %.1f ms", self.hook, name, count, took_ms)
            if self.journal:
                self.journal.changes[name] += count
        graph.lint()

    def uuid(self) -> str:
        """All that the passes depend on: a compiled graph serves only while it stays the same."""
        parts = (
            self.hook,
            repr(self.config),
            _source_hash(),
            _library.source_hash(),
            native.status(),  # what fuses depends on the kernels there are
            repr(nvlink.group_names()),  # and on where there are windows
            repr(cost_model()),  # what runs during an exchange depends on what it costs
        )
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def listened(inductor: Mapping[str, Any], journal: Journal) -> dict[str, Any]:
    """The options `inductor` with passes that write into `journal`."""
    return {
        name: dataclasses.replace(value, journal=journal)
        if isinstance(value, CompositePass)
        else value
        for name, value in inductor.items()
    }


def name_of_pass(run: Pass) -> str:
    """For messages: `fuse_swiglu` of `fuse_swiglu_pass`, options bound or not."""
    function = run.func if isinstance(run, functools.partial) else run
    return getattr(function, "__name__", str(run)).removesuffix("_pass")


def _source_hash() -> str:
    return _library.source_hash(pathlib.Path(__file__).parent)
