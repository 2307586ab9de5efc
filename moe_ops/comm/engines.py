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

from .agreement import agree
from .groups import backend_of, group_name_of, resolve

_log = logging.getLogger(__name__)


def available_engines() -> dict[str, str]:
    """Engine name -> "available", or the reason why it is not."""
    gloo = dist.is_available() and dist.is_gloo_available()
    nccl = dist.is_available() and dist.is_nccl_available() and torch.cuda.is_available()
    return {
        "gloo": "available" if gloo else "torch was built without gloo",
        "nccl": "available" if nccl else "needs a CUDA build of torch and a GPU",
    }


def engine(group: dist.ProcessGroup | str | None) -> str:
    """Name of the engine that carries `group`'s exchanges; "none" for one process without a
    group.
    """
    name = group_name_of(group)
    return backend_of(resolve(name)) if name else "none"


def setup(
    group: dist.ProcessGroup | str | None,
    *,
    engine: str = "auto",
    max_tokens: int,
    hidden_size: int,
    dtype: torch.dtype,
    num_sms: int | None = None,
    timeout_s: float = 60,
) -> str:
    """Prepare `group` for exchanges of up to `max_tokens` rows of `hidden_size` values a rank;
    returns the engine.

    Collective, once per group. A group never set up uses its own backend (gloo or NCCL) and its own
    timeout.

    Args:
        engine: "auto", or a name from `available_engines()`. MOE_OPS_ENGINE replaces "auto" only.
        num_sms: multiprocessors an engine with kernels of its own may use.
        timeout_s: seconds after which a collective that a rank does not join fails.

    Raises:
        ValueError: on every rank, if ranks disagree, a value is out of range, or the named engine
            cannot run.
    """
    name = group_name_of(group)
    wanted = os.environ.get("MOE_OPS_ENGINE", "auto") if engine == "auto" else engine
    backend = backend_of(resolve(name)) if name else "none"

    def check() -> tuple[object, ...]:
        for what, value in (("max_tokens", max_tokens), ("hidden_size", hidden_size)):
            if value < 1:
                raise ValueError(f"setup: {what} must be positive, got {value}")
        if num_sms is not None and num_sms < 1:
            raise ValueError(f"setup: num_sms must be positive or None, got {num_sms}")
        if timeout_s <= 0:
            raise ValueError(f"setup: timeout_s must be positive, got {timeout_s}")
        if wanted not in ("auto", backend):
            raise ValueError(
                f"setup: engine must be 'auto' or one that can carry this group, got {wanted!r}; "
                f"the group's backend is {backend!r}, engines: {available_engines()}"
            )
        return wanted, max_tokens, hidden_size, dtype, num_sms, timeout_s

    if name and timeout_s > 0:  # before `agree`, so that it waits no longer itself
        c10d._set_pg_timeout(datetime.timedelta(seconds=timeout_s), resolve(name))
    agree("setup", name, check)
    _log.info("group %r: exchanges run on %s", name, backend)
    return backend
