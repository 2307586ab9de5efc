"""What a run has done so far, and where its checkpoints lie."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Progress:
    """Grows by one entry a step; `identity` is that of the run's Settings."""

    identity: dict[str, Any]
    step: int = 0
    seconds: float = 0.0
    loss: list[float] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)
    tokens_per_expert: list[list[list[int]]] = field(default_factory=list)

    def write(self, checkpoint: Path) -> None:
        """Store it in a checkpoint's folder."""
        (checkpoint / "progress.json").write_text(json.dumps(asdict(self)))

    @staticmethod
    def read(checkpoint: Path) -> Progress:
        """As it was when the checkpoint was written."""
        return Progress(**json.loads((checkpoint / "progress.json").read_text()))


def latest(root: Path) -> Path | None:
    """The newest complete checkpoint."""
    return max(root.glob("step_*"), default=None)


def is_finished(checkpoint: Path) -> bool:
    """Whether the run that wrote it came to its end."""
    return (checkpoint / "finished").exists()


def mark_finished(checkpoint: Path) -> None:
    """Let the next run start anew."""
    (checkpoint / "finished").touch()
