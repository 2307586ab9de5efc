"""What the passes did and what they left alone, for whoever listens: `explain` does."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from contextvars import ContextVar

from torch.fx import Graph


@dataclasses.dataclass(frozen=True)
class Decision:
    """Of `pass_name` on one match: rewritten, or left alone for a `reason`.

    `bytes_saved`: what the rewritten graph writes less.
    """

    pass_name: str
    match: str
    reason: str | None
    bytes_saved: int = 0


@dataclasses.dataclass
class Journal:
    """`written` says how many bytes a graph writes; `changes` counts by pass, in order; `running`
    is the pass at work, if it is known.
    """

    written: Callable[[Graph], int] = lambda graph: 0
    decisions: list[Decision] = dataclasses.field(default_factory=list)
    changes: Counter[str] = dataclasses.field(default_factory=Counter)
    running: str = ""


_current: ContextVar[Journal | None] = ContextVar("journal", default=None)


def current() -> Journal | None:
    """The journal to write into, if anybody listens in this thread."""
    return _current.get()


@contextlib.contextmanager
def listening(journal: Journal | None, running: str = "") -> Iterator[None]:
    """Within the block passes, or the one that is `running`, write into `journal`."""
    token = _current.set(journal)
    if journal:
        journal.running = running
    try:
        yield
    finally:
        _current.reset(token)
