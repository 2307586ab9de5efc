"""Errors and settings that all ranks of a group must share before they exchange anything.

`agree` is what makes a bad argument on one rank an error on every rank instead of a hang: each rank
contributes a hash of its settings, or of its error, in a message of fixed size, whatever operator
it is in.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ..layout import read_splits
from .collectives import all_gather
from .groups import backend_of, device_of, group_rank, resolve

# Settings compared once, by group: names are used again after a group is destroyed.
_agreed: weakref.WeakKeyDictionary[dist.ProcessGroup, set[str]] = weakref.WeakKeyDictionary()


def agree(op: str, group_name: str, check: Callable[[], Any]) -> None:
    """Run `check` on this rank; raise on every rank if it raised on one or if its results differ.

    `check()` returns this rank's settings, anything with a repr. With gloo every call is compared:
    16 bytes a rank. With NCCL reading the answer would wait for the device, so only settings not
    seen before are; a fault that strikes one rank later ends in the group's own timeout.
    """
    if group_name:
        resolve(group_name, op)
    settings, error = op, None
    try:
        settings = f"{op}{check()!r}"
    except (TypeError, ValueError, RuntimeError) as raised:
        settings, error = f"{type(raised).__name__}: {raised}", raised
    if group_name:
        disagreement = _disagreement(op, group_name, settings, error is not None)
        if error is None and disagreement:
            raise ValueError(disagreement)
    if error is not None:
        raise error


def _disagreement(op: str, group_name: str, settings: str, failed: bool) -> str | None:
    """What the ranks gave, if it is not the same everywhere or one of them failed."""
    group = resolve(group_name)
    known = _agreed.setdefault(group, set())
    if group.size() == 1 or settings in known or (backend := backend_of(group)) == "fake":
        return None
    digest = int.from_bytes(hashlib.blake2b(settings.encode(), digest_size=7).digest(), "big")
    mine = torch.tensor([digest, failed], device=device_of(group))
    numbers = read_splits(all_gather(mine, group_name).cpu())
    if len(set(numbers[::2])) == 1 and not any(numbers[1::2]):
        if backend != "gloo":
            known.add(settings)
        return None
    texts: list[Any] = [None] * group.size()
    dist.all_gather_object(texts, settings, group=group)
    listed = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts))
    return (
        f"{op}: every rank of group {group_name!r} must call it with valid arguments and "
        f"the same settings, got on rank {group_rank(group_name)} the answers {listed}"
    )
