"""What is known of slots that are sorted by expert and sent.

Letters: T tokens, K top-k, E experts, P ranks, L = E / P experts here, H hidden.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from .term import Term


class NotRoutedError(Exception):
    """Why a term is no routed rows, and the term that stands in the way."""

    def __init__(self, term: Term, reason: str) -> None:
        super().__init__(reason)
        self.term, self.reason = term, reason


@dataclasses.dataclass(frozen=True)
class Routing:
    """Slots of `ids` sorted by `num_experts` experts on the `num_ranks` ranks of `group`. `plan`:
    the arguments of this library's plan, if there is one.
    """

    ids: Term
    num_experts: int
    num_ranks: int
    group: Any
    plan: tuple[Any, ...] | None = None

    @property
    def num_local(self) -> int:
        """L."""
        return self.num_experts // self.num_ranks

    @property
    def is_in_order(self) -> bool:
        """Whether what arrives is by (expert, rank) already."""
        return 1 in (self.num_local, self.num_ranks)


@dataclasses.dataclass(frozen=True)
class Sent:
    """One value a slot, in order: rows of `x` [T, H], times `weights` [T, K] if both are there."""

    ids: Term
    x: Term | None
    weights: Term | None
    top_k: int | None
