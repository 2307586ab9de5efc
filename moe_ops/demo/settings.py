"""What one demo run is made of: sizes, schedule, places. Each field is a command-line option."""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
from dataclasses import asdict, dataclass
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import torch

from ..parallel import ParallelLayout

# Files of what the passes do to a block.
PASSES_TEXT, PASSES_PICTURE, PASSES_TRACE = "passes.txt", "passes.png", "passes.json"
# Axes that --layout may name.
AXES = ("ep", "etp", "cp")


class Refused(ValueError):
    """The command was given something that cannot work; its text is all a user needs."""


def _option(default: Any, text: str, **extra: Any) -> Any:
    return dataclasses.field(default=default, metadata={"help": text, **extra})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The field `world_size` is the option `--world-size`, and so on."""

    steps: int = _option(400, "optimizer steps")
    out: str = _option("demo_out", "folder for checkpoints, pictures and metrics.json")
    world_size: int = _option(
        0, "processes that share the model; 0 = 2 on CPU, as many as GPUs but at most 2 on GPUs"
    )
    layout: str = _option(
        "",
        "sizes of the axes ep, etp and cp of moe_ops.parallel.ParallelLayout, such as ep=2,cp=2, "
        "1 where not named; nothing = ep=WORLD_SIZE",
    )
    device: str = _option(
        "auto", "where to train; auto = GPUs if there are any", choices=("auto", "cpu", "cuda")
    )
    seed: int = _option(0, "seed of weights and batches")
    batch: int = _option(16, "sequences a step, over all processes")
    context: int = _option(128, "bytes a sequence")
    hidden: int = _option(96, "hidden size")
    ffn: int = _option(128, "inner size of an expert and of the shared expert")
    layers: int = _option(3, "transformer blocks, each with a mixture of experts")
    heads: int = _option(3, "attention heads")
    experts: int = _option(8, "experts a block, spread evenly over the processes of ep")
    top_k: int = _option(2, "experts a byte is sent to")
    learning_rate: float = _option(8e-3, "peak learning rate of AdamW")
    corpus_megabytes: float = _option(8.0, "source text to read, for training and validation")
    eval_batches: int = _option(24, "batches in the final validation loss")
    eval_every: int = _option(100, "steps between points of the validation curve; 0 = none")
    save_every: int = _option(100, "steps between checkpoints")
    fresh: bool = _option(False, "start anew even if an unfinished run could be resumed")
    no_compile: bool = _option(False, "run the blocks eagerly, without torch.compile")

    def __post_init__(self) -> None:
        lowest = dict.fromkeys(("steps", "batch", "layers", "heads", "top_k", "eval_batches"), 1)
        lowest |= {"context": 2, "world_size": 0, "eval_every": 0, "save_every": 1}
        for name, low in lowest.items():
            if (value := getattr(self, name)) < low:
                raise Refused(f"demo: {name} must be at least {low}, got {value}")
        if self.top_k > self.experts:
            raise Refused(f"demo: top_k must be at most experts ({self.experts}), got {self.top_k}")
        ep, etp, cp = self._sizes()
        world_size = self.world_size or math.lcm(ep * etp, cp)  # not known yet: one that fits
        for name, value, unit, why in (
            ("hidden", self.hidden, 2 * self.heads, "2 * heads"),
            ("world_size", world_size, ep * etp, "ep * etp"),
            ("world_size", world_size, cp, "cp"),
            ("experts", self.experts, ep, "ep"),
            ("ffn", self.ffn, etp, "etp"),
            ("batch", self.batch, world_size // cp, "world_size / cp"),
            ("context", self.context, 2 * cp if cp > 1 else 1, "2 * cp"),
        ):
            if value % unit:
                raise Refused(
                    f"demo: {name} must be a multiple of {unit}, got {value}; {unit} = {why}"
                )

    def _sizes(self) -> list[int]:
        """Of `AXES`."""
        if not self.layout:
            return [max(self.world_size, 1), 1, 1]
        sizes: dict[str, int] = {}
        for part in self.layout.split(","):
            name, _, size = part.partition("=")
            if name in ("tp", "pp"):
                raise Refused(
                    f"demo: layout must not name {name}: the demo splits no "
                    f"{'weights of attention' if name == 'tp' else 'stages'}, got {self.layout!r}"
                )
            if name not in AXES or name in sizes or not size.isdecimal() or int(size) < 1:
                raise Refused(
                    f"demo: layout must give {', '.join(AXES)} positive sizes, each at most once, "
                    f"such as ep=2,cp=2, got {part!r} in {self.layout!r}"
                )
            sizes[name] = int(size)
        return [sizes.get(name, 1) for name in AXES]

    def parallel_layout(self) -> ParallelLayout:
        """Which ranks share what, once `world_size` is known."""
        ep, etp, cp = self._sizes()
        return ParallelLayout(world=self.world_size, ep=ep, etp=etp, cp=cp)

    @property
    def checkpoints(self) -> Path:
        return Path(self.out) / "checkpoints"

    def identity(self) -> dict[str, Any]:
        """What decides the course of the training: a checkpoint goes on only with the same.

        The number of processes and their layout are not part of it, nor how many steps there are
        in all.
        """
        free = {"steps", "out", "world_size", "layout", "device", "fresh", "no_compile"}
        free |= {"eval_batches", "eval_every", "save_every"}
        return {name: value for name, value in asdict(self).items() if name not in free}

    def is_default(self) -> bool:
        """Whether the loss that the demo promises can be asked for."""
        default = Settings()
        return self.steps == default.steps and self.identity() == default.identity()

    def resolved(self) -> Settings:
        """Replace `auto` and 0 by what this machine has."""
        gpus = torch.cuda.device_count()
        device = self.device if self.device != "auto" else ("cuda" if gpus else "cpu")
        world_size = self.world_size or (min(2, gpus) if device == "cuda" else 2)
        if device == "cuda" and not 0 < world_size <= gpus:
            raise Refused(
                f"demo: world_size must be at most the number of GPUs, got {world_size} for "
                f"{gpus}; use --device cpu"
            )
        return dataclasses.replace(self, device=device, world_size=world_size)


@dataclass(frozen=True)
class Job:
    """What the parent hands to each worker."""

    settings: Settings
    resume_from: Path | None
    rendezvous: Path
    parent: int
    stop: Event

    def stop_requested(self) -> bool:
        """Asked by the parent, or the parent is gone. Ranks may see it at different steps."""
        return self.stop.is_set() or os.getppid() != self.parent


_TYPES = {"int": int, "float": float, "str": str}


def add_arguments(parser: argparse.ArgumentParser, *names: str) -> None:
    """Add one option for each field of `Settings`, or for those of these `names` alone."""
    for option in dataclasses.fields(Settings):
        if names and option.name not in names:
            continue
        flag = "--" + option.name.replace("_", "-")
        if option.type == "bool":
            parser.add_argument(flag, action="store_true", **option.metadata)
        else:
            kind = _TYPES[str(option.type)]
            parser.add_argument(flag, type=kind, default=option.default, **option.metadata)


def from_arguments(args: argparse.Namespace) -> Settings:
    """The settings that `add_arguments`' options were given."""
    names = {field.name for field in dataclasses.fields(Settings)}
    return Settings(**{name: value for name, value in vars(args).items() if name in names})
