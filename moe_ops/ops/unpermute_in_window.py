"""`unpermute` whose sums `combine` sends on: where the group's engine has a window, they lie there,
so that peers read them and nothing is sent. Private: `fx_passes` makes it.

Letters: as in `moe_ops.ops.permute`; T copies (the plan's D), K top-k, C rows, H hidden.

    rows_CH = [[1], [2], [4], [2], [1], [3], [4], [0]], and from sort_slots of [[2, 0], [0, 1],
    [2, -1], [0, 2]]: row_of_slot_TK = [[4, 0], [1, 3], [5, -1], [2, 6]]
    -> [[2], [4], [3], [8]]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import _library

_UNPERMUTE = _library.info("unpermute")


# NOTE: `group`, not `group_name`: that would make the operator collective (`_library.define`).
def _without_group(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: function(*args[:-1])


def _reference(
    rows_CH: torch.Tensor,
    weights_TK: torch.Tensor | None,
    slot_of_row_C: torch.Tensor,
    row_of_slot_TK: torch.Tensor,
    group: str,
) -> torch.Tensor:
    """By any kernel: the group's engine may be another than when the graph was compiled."""
    maps = slot_of_row_C, row_of_slot_TK
    sums: torch.Tensor = torch.ops.moe_ops.unpermute(rows_CH, weights_TK, *maps)
    return sums


_library.define(
    "unpermute_in_window(Tensor rows_CH, Tensor? weights_TK, Tensor slot_of_row_C,"
    " Tensor row_of_slot_TK, str group) -> Tensor",
    check=_without_group(_UNPERMUTE.check),
    reference=_reference,
    fake=_without_group(_UNPERMUTE.fake),
    private=True,
)
