"""Which engine carries a group's exchanges. Graphs hold the group's name alone; the engine is
chosen inside the op.
"""

from __future__ import annotations

import datetime
import logging
import os

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from . import deep_ep, nvlink
from .agreement import agree
from .groups import backend_of, group_name_of, group_rank, resolve

_log = logging.getLogger(__name__)

_OVER_NCCL = {"nvlink": nvlink, "deep_ep": deep_ep}  # engine -> its module; for groups of NCCL


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
        engine: "auto", or a name from `available_engines()`. MOE_OPS_ENGINE replaces "auto" only.
            "auto" takes `nvlink` for a group of NCCL whose ranks, at most 8, are Hopper GPUs of one
            host, with native kernels, for bf16, fp16 or float32; else the backend; never `deep_ep`.
        max_tokens: most tokens that a rank brings to an exchange.
        hidden_size, dtype: of the longest rows.
        num_sms: most multiprocessors, up to 64; None: 14 of `nvlink`, its own (even) of `deep_ep`.
        timeout_s: seconds after which a collective that a rank does not join fails; on `nvlink`
            the CUDA context ends; `deep_ep` has a limit of its own.
        window_bytes: bytes on each rank where `nvlink` places what `dispatch` returns and sums that
            compiled layers give `combine`, which spares a copy; None: 4 of the greatest size.

    Raises:
        ValueError: on every rank, if ranks disagree, a value is wrong or the engine cannot run.
    """
    name = group_name_of(group)
    wanted = os.environ.get("MOE_OPS_ENGINE", "auto") if engine == "auto" else engine
    backend = backend_of(resolve(name)) if name else "none"
    sizes = {"max_tokens": max_tokens, "hidden_size": hidden_size, "num_sms": num_sms}

    def check() -> tuple[object, ...]:
        _check(sizes, timeout_s, window_bytes)
        _check_engine(wanted, backend)
        return wanted, sizes, dtype, timeout_s, window_bytes

    if name and timeout_s > 0:  # before `agree`, so that it waits no longer itself
        c10d._set_pg_timeout(datetime.timedelta(seconds=timeout_s), resolve(name))
    agree("setup", name, check)
    for module in _OVER_NCCL.values():
        module.drop(name)
    chosen = _choose(name, wanted, backend, dtype)
    if chosen == "nvlink":
        nvlink.create(
            name,
            max_tokens=max_tokens,
            row_bytes=hidden_size * dtype.itemsize,
            num_sms=num_sms,
            timeout_s=timeout_s,
            window_bytes=window_bytes,
        )
    elif chosen == "deep_ep":
        deep_ep.create(name, hidden_size=hidden_size, num_sms=num_sms)
    _log.info("group %r: exchanges run on %s", name, chosen)
    return chosen


def _check(sizes: dict[str, int | None], timeout_s: float, window_bytes: int | None) -> None:
    for what, value in sizes.items():
        if value is not None and value < 1:
            raise ValueError(f"setup: {what} must be positive, got {value}")
    if (num_sms := sizes["num_sms"]) is not None and num_sms > nvlink.MAX_SMS:
        raise ValueError(f"setup: num_sms must be at most {nvlink.MAX_SMS}, got {num_sms}")
    if (max_tokens := sizes["max_tokens"]) is not None and max_tokens > nvlink.MAX_TOKENS:
        raise ValueError(f"setup: max_tokens must be at most {nvlink.MAX_TOKENS}, got {max_tokens}")
    if timeout_s <= 0:
        raise ValueError(f"setup: timeout_s must be positive, got {timeout_s}")
    if window_bytes is not None and window_bytes < 0:
        raise ValueError(f"setup: window_bytes must not be negative, got {window_bytes}")


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
        _log.info("group %r: falls back from %s to %s: %s", name, best, backend, why)
    return backend
