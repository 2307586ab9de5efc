"""Text that is on every machine: the sources of the Python standard library, as bytes.

N bytes of text, B sequences, T positions.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from .settings import Refused, Settings

# Tests are left out for being repetitive, encodings for being tables: neighbours there are near
# copies of one another, which would make held-out files easy.
EXCLUDED_FOLDERS = {
    "__pycache__", "dist-packages", "encodings", "idle_test", "site-packages", "test", "tests",
}  # fmt: skip
LARGEST_FILE = 64 * 1024
VALIDATION_SHARE = 1 / 16


@dataclass(frozen=True)
class Corpus:
    """Training files and held-out files, each joined to one text."""

    train_N: Tensor
    validation_N: Tensor
    num_train_files: int
    num_validation_files: int


def source_files(root: Path) -> list[Path]:
    """All .py files below root outside the excluded folders, in the order of their hash."""
    found: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [s for s in subfolders if s not in EXCLUDED_FOLDERS]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(found, key=lambda path: _hash("order", path, root))


def load_corpus(megabytes: float, root: Path | None = None) -> Corpus:
    """Read files, the first 64 KB of each, up to `megabytes` in all.

    A file is on one side only, and on the same one whatever the size of the corpus.
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    train: list[bytes] = []
    validation: list[bytes] = []
    budget = int(megabytes * 1e6)
    for path in source_files(root):
        text = path.read_bytes()[:LARGEST_FILE]
        if len(text) > budget:
            break
        budget -= len(text)
        held_out = _hash("side", path, root) < VALIDATION_SHARE
        (validation if held_out else train).append(text)
    return Corpus(_join(train), _join(validation), len(train), len(validation))


def training_batch(
    text_N: Tensor, settings: Settings, *, step: int, rank: int, world_size: int
) -> Tensor:
    """tokens_BT of a step for rank `rank` of the `world_size` that share a batch, with
    T = context + 1: a pure function of seed and step.

    So no position in the data needs to be saved, and the batch of a step is the same for any
    number of ranks.
    """
    generator = torch.Generator().manual_seed((settings.seed << 32) + step)
    last = len(text_N) - settings.context
    starts_B = torch.randint(_at_least_one(last), (settings.batch,), generator=generator)
    return _windows(text_N, starts_B[rank::world_size], settings.context)


def validation_batches(
    text_N: Tensor, settings: Settings, *, num_batches: int, rank: int, world_size: int
) -> list[Tensor]:
    """The same of each of num_batches batches, whose windows lie evenly over the text."""
    last = len(text_N) - settings.context
    places = torch.linspace(0, _at_least_one(last) - 1, num_batches * settings.batch)
    return [
        _windows(text_N, starts_B[rank::world_size], settings.context)
        for starts_B in places.long().split(settings.batch)
    ]


def _hash(purpose: str, path: Path, root: Path) -> float:
    """A number in [0, 1) that depends on the file's name alone."""
    text = f"{purpose} {path.relative_to(root).as_posix()}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64


def _join(files: list[bytes]) -> Tensor:
    return torch.frombuffer(bytearray(b"\0".join(files) + b"\0"), dtype=torch.uint8)


def _windows(text_N: Tensor, starts_B: Tensor, context: int) -> Tensor:
    return text_N[starts_B[:, None] + torch.arange(context + 1)].long()


def _at_least_one(num_windows: int) -> int:
    if num_windows < 1:
        raise Refused(
            f"demo: training and validation text must be longer than context, got "
            f"{1 - num_windows} bytes too few; give a larger --corpus-megabytes"
        )
    return num_windows
