"""Which engine carries a group's exchanges. Graphs hold the group's name alone; the engine is
chosen inside the op.
"""

from __future__ import annotations

import datetime
import logging
import math
import os
import weakref

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from .. import checks
from . import deep_ep, nvlink
from .agreement import agree
from .groups import backend_of, group_name_of, group_rank, resolve

_log = logging.getLogger(__name__)

_OVER_NCCL = {"nvlink": nvlink, "deep_ep": deep_ep}  # engine -> its module; for groups of NCCL

_warned: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()  # names are used again


def available_engines() -> dict[str, str]:
    """Engine name -> "available", or the reason why it is not."""
    gloo = dist.is_available() and dist.is_gloo_available()
    nccl = dist.is_available() and dist.is_nccl_available() and torch.cuda.is_available()
    return {
        "gloo": "available" if gloo else "torch was built without gloo",
        "nccl": "available" if nccl else "needs a CUDA build of torch and a GPU",
        **{name: module.unavailable() or "available" for name, module in _OVER_NCCL.items()},
    }


def engine(group: dist.ProcessGroup | str | None) -> str:
    """Name of the engine that carries `group`'s exchanges; "none" for one process without a
    group.
    """
    name = group_name_of(group)
    if not name:
        return "none"
    set_up = (engine for engine, module in _OVER_NCCL.items() if module.workspace(name))
    return next(set_up, None) or backend_of(resolve(name))


def setup(
    group: dist.ProcessGroup | str | None,
    *,
    engine: str = "auto",
    max_tokens: int,
    hidden_size: int,
    dtype: torch.dtype,
    num_sms: int | None = None,
    timeout_s: float = 60,
    window_bytes: int | None = None,
) -> str:
    """Prepare `group` for exchanges of up to `max_tokens` rows a rank; returns the engine.

    Collective, once per group; a later call replaces an earlier one. A group never set up uses its
    own backend (gloo or NCCL) and its own timeout.

    Args:
        engine: "auto", or a name from `available_engines()`. MOE_OPS_ENGINE, unless empty, replaces
            "auto", which takes `nvlink` for a group of NCCL whose ranks, at most 8, are Hopper GPUs
            of one host with at least 128 multiprocessors, one a rank, and native kernels, for bf16,
            fp16 or float32; else the backend (one host: rank 0 warns once); never `deep_ep`.
        max_tokens: most tokens that a rank brings to an exchange; more are an error on `nvlink`.
        hidden_size, dtype: of the longest rows; longer ones go over NCCL.
        num_sms: most multiprocessors, up to 64; `deep_ep`: even; None: 14, or DeepEP's own number.
        timeout_s: seconds after which a collective that a rank does not join fails, every other one
            of the group included. Set it above the longest time that ranks drift apart
            (compilation, checkpoints, evaluation), or give the experts a group of their own. On
            `nvlink` the CUDA context ends; `deep_ep` has a limit of its own.
        window_bytes: bytes on each rank where `nvlink` places what `dispatch` returns and sums that
            compiled layers give `combine`, which spares a copy; None: 4 of the greatest size.

    Raises:
        TypeError, ValueError: on every rank, if values are wrong or differ, or the engine is unfit.
    """
    name = group_name_of(group)
    wanted = os.environ.get("MOE_OPS_ENGINE") or "auto" if engine == "auto" else engine
    backend = backend_of(resolve(name)) if name else "none"
    sizes = {"max_tokens": max_tokens, "hidden_size": hidden_size}
    limits = {"num_sms": num_sms, "window_bytes": window_bytes}

    def check() -> tuple[object, ...]:
        _check(sizes, limits, dtype, timeout_s)
        _check_engine(wanted, backend)
        if name:  # before ranks compare, so that this waits no longer itself
            c10d._set_pg_timeout(datetime.timedelta(seconds=timeout_s), resolve(name))
        return wanted, sizes, limits, dtype, timeout_s

    agree("setup", name, check)
    for module in _OVER_NCCL.values():
        module.drop(name)
    chosen = _choose(name, wanted, backend, dtype)
    if chosen == "nvlink":
        row_bytes = hidden_size * dtype.itemsize
        nvlink.create(
            name, max_tokens=max_tokens, row_bytes=row_bytes, timeout_s=timeout_s, **limits
        )
    elif chosen == "deep_ep":
        deep_ep.create(name, hidden_size=hidden_size, num_sms=num_sms)
    _log.info("group %r: exchanges run on %s", name, chosen)
    return chosen


def _check(
    sizes: dict[str, int], limits: dict[str, int | None], dtype: object, timeout_s: object
) -> None:
    given = sizes | {what: value for what, value in limits.items() if value is not None}
    for what, value in given.items():
        checks.whole_number("setup", what, value)
        if what != "window_bytes":
            checks.positive("setup", what, value)
    if given["max_tokens"] > nvlink.MAX_TOKENS:
        raise ValueError(
            f"setup: max_tokens must be at most {nvlink.MAX_TOKENS}, got {given['max_tokens']}"
        )
    if (num_sms := given.get("num_sms", 1)) > nvlink.MAX_SMS:
        raise ValueError(f"setup: num_sms must be at most {nvlink.MAX_SMS}, got {num_sms}")
    if (window_bytes := given.get("window_bytes", 0)) < 0:
        raise ValueError(f"setup: window_bytes must not be negative, got {window_bytes}")
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"setup: dtype must be a torch.dtype, got {dtype!r}")
    if not isinstance(timeout_s, (int, float)) or isinstance(timeout_s, bool):
        raise TypeError(f"setup: timeout_s must be a number, got {timeout_s!r}")
    if not 0 < timeout_s < math.inf:
        raise ValueError(f"setup: timeout_s must be positive and finite, got {timeout_s}")


def _check_engine(wanted: str, backend: str) -> None:
    if wanted not in ("auto", backend, *_OVER_NCCL):
        raise ValueError(
            f"setup: engine must be 'auto' or one that can carry this group, got {wanted!r}; "
            f"the group's backend is {backend!r}, engines: {available_engines()}"
        )


def _choose(name: str, wanted: str, backend: str, dtype: torch.dtype) -> str:
    """The engine, the same on every rank. Collective."""
    if wanted == backend or (wanted == "auto" and backend != "nccl"):
        return backend
    best = "nvlink" if wanted == "auto" else wanted
    if backend == "nccl":
        why = _OVER_NCCL[best].obstacle(name, dtype)
    else:
        why = f"its backend is {backend!r}, not 'nccl'"
    if why is None:
        return best
    if wanted != "auto":
        raise ValueError(f"setup: engine {wanted!r} cannot carry group {name!r}: {why}")
    if group_rank(name) == 0:
        _log.log(
            _level(name, why), "group %r: falls back from %s to %s: %s", name, best, backend, why
        )
    return backend


def _level(name: str, why: str) -> int:
    """A warning, once per group, unless its ranks are on several hosts, where that is expected."""
    group = resolve(name)
    if group in _warned or "hosts" in why:
        return logging.INFO
    _warned.add(group)
    return logging.WARNING
