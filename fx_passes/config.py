"""Which passes run, and within which bounds: `PassConfig`, by keyword or from a JSON file."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe_ops.comm import nvlink

from .cost_model import CostModel
from .defer_wgrad import DeferWgrad
from .overlap_shared_experts import OverlapSharedExperts

MEASURED = "measured"  # key of a file that says how its settings were found
_BOUNDS: dict[str, type[Any]] = {
    "overlap_shared_experts": OverlapSharedExperts,
    "defer_wgrad": DeferWgrad,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PassConfig:
    """Switches and bounds, one field per pass, named after it, and what they share.

    `fuse_permute_all_to_all`: rows that a layer of plain PyTorch, or the alltoall dispatcher, sorts
        and sends to experts and back become one exchange of tokens.
    `chunk_exchange`: number of chunks of tokens in which a layer runs, one's exchange under
        another's matmuls; 1: whole.
    `fold_permute_grouped_mm`: expanded rows are not kept for backward, nor written where a kernel
        gathers tokens itself.
    `fuse_swiglu`: the activation runs within the matmul beside it and is not kept for backward.
    `protect_exchange`: exchanges and their plans are kept for backward, not run again, whatever
        activation checkpointing says.
    `split_exchange`: a dispatch or combine starts as soon as it can and is waited for where its
        results are read; what lies between runs between.
    `num_comm_sms`: multiprocessors of an exchange that `split_exchange` split, on the engine
        `nvlink`; None: those of `moe_ops.comm.setup`. The same on all ranks.
    `interleave_exchanges`: exchanges of which neither needs the other, as of two micro-batches in
        one graph, take turns, each under the other's work.
    `overlap_shared_experts`: shared experts and other work that needs no routed tokens run during
        an exchange; `OverlapSharedExperts(max_bytes, min_us)` bounds it.
    `defer_wgrad`: gradients of weights are computed during an exchange;
        `DeferWgrad(max_bytes, min_us)` bounds it.
    `expected_rows`: rows of a rank's experts by which costs are estimated where only the device
        knows how many there are; None: as many as a rank's tokens have choices.
    `cost_model`: what says how long calls take; None: the table's figures of the current device.
    `lower`: gradients of float32 weights under autocast stay in float32; what a rank sends back is
        summed where its peers can read it.
    """

    fuse_permute_all_to_all: bool = True
    chunk_exchange: int = 1
    fold_permute_grouped_mm: bool = True
    fuse_swiglu: bool = True
    protect_exchange: bool = True
    split_exchange: bool = True
    num_comm_sms: int | None = None
    interleave_exchanges: bool = True
    overlap_shared_experts: bool | OverlapSharedExperts = True
    defer_wgrad: bool | DeferWgrad = True
    expected_rows: int | None = None
    cost_model: CostModel | None = None
    lower: bool = True

    def __post_init__(self) -> None:
        """Refuse what is no setting."""
        for name, value in _checked(vars(self), "options").items():
            object.__setattr__(self, name, value)
        if self.cost_model is not None and self.expected_rows is not None:
            raise ValueError(
                "options: expected_rows must be left to the cost_model that is given, got "
                f"{self.expected_rows}"
            )


def config_of(
    config: PassConfig | str | os.PathLike[str] | None, overrides: Mapping[str, Any]
) -> PassConfig:
    """`config`, or what the JSON file of that path holds, with `overrides`.

    Raises:
        ValueError: of a field that there is not, a value that it does not take, or a `config` that
            is neither.
    """
    if not isinstance(config, PassConfig | str | os.PathLike | None):
        raise ValueError(
            "options: config must be a PassConfig or a path, got a "
            f"{type(config).__name__}; pass settings by keyword"
        )
    if not isinstance(config, PassConfig):
        config = PassConfig() if config is None else read(config)
    return dataclasses.replace(config, **_checked(overrides, "options"))


def read(path: str | os.PathLike[str]) -> PassConfig:
    """The settings of a JSON file; how they were found, if it says, is left out.

    Raises:
        ValueError: naming the file, of what it should not hold.
    """
    source = os.fspath(path)
    text = Path(path).read_text()
    try:
        settings = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{source}: must hold JSON, got {text[:40]!r} ({error})") from error
    if not isinstance(settings, dict):
        raise ValueError(f"{source}: must hold one JSON object, got {settings!r}")
    settings.pop(MEASURED, None)
    return PassConfig(**_checked(settings, source))


def as_json(config: PassConfig) -> dict[str, Any]:
    """What `read` makes `config` of, but for its `cost_model`."""
    return dataclasses.asdict(dataclasses.replace(config, cost_model=None))


def _checked(settings: Mapping[str, Any], source: str) -> dict[str, Any]:
    """`settings` as `PassConfig` holds them; `source` of them is for messages."""
    known = [field.name for field in dataclasses.fields(PassConfig)]
    if unknown := sorted(settings.keys() - set(known)):
        raise ValueError(
            f"{source}: settings must be among [{', '.join(known)}], got {', '.join(unknown)}"
        )
    return {name: _value(name, value, source) for name, value in settings.items()}


def _value(name: str, value: Any, source: str) -> Any:
    if kind := _BOUNDS.get(name):
        return _bounds(name, kind, value, source)
    if name == "chunk_exchange":
        allowed, fine = "a positive number", type(value) is int and value >= 1
    elif name == "expected_rows":
        allowed = "None or a positive number"
        fine = value is None or (type(value) is int and value >= 1)
    elif name == "cost_model":
        allowed, fine = "None or a CostModel", value is None or isinstance(value, CostModel)
    elif name == "num_comm_sms":
        most = nvlink.MAX_SMS
        allowed = f"None or a number from 1 to {most}"
        fine = value is None or (type(value) is int and 1 <= value <= most)
    else:
        allowed, fine = "True or False", isinstance(value, bool)
    if not fine:
        raise ValueError(f"{source}: {name} must be {allowed}, got {value!r}")
    return value


def _bounds(name: str, kind: type[Any], value: Any, source: str) -> Any:
    """True, False, or a `kind`; JSON holds the fields of one."""
    if isinstance(value, bool):
        return value
    known = [field.name for field in dataclasses.fields(kind)]
    fields = dataclasses.asdict(value) if isinstance(value, kind) else value
    if not isinstance(fields, Mapping):
        raise ValueError(
            f"{source}: {name} must be True, False or bounds [{', '.join(known)}], got {value!r}"
        )
    if unknown := sorted(fields.keys() - set(known)):
        raise ValueError(
            f"{source}: bounds of {name} must be among [{', '.join(known)}], "
            f"got {', '.join(unknown)}"
        )
    for bound, number in fields.items():
        numbers, rule = (
            ((int,), "whole number") if bound == "max_bytes" else ((int, float), "number")
        )
        if type(number) not in numbers or not number >= 0:
            raise ValueError(
                f"{source}: {bound} of {name} must be a {rule} of 0 or more, got {number!r}"
            )
    return kind(**fields)
