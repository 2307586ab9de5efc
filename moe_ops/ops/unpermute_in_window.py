"""`unpermute` whose sums `combine` sends on: where the group's engine has a window, they lie there,
so that peers read them and nothing is sent. Private: `fx_passes` makes it.

Letters: as in `moe_ops.ops.permute`; T tokens, K top-k, C rows, H hidden.

    rows_CH = [[1], [2], [4], [2], [1], [3], [4], [0]], and from sort_slots of [[2, 0], [0, 1],
    [2, -1], [0, 2]]: row_of_slot_TK = [[4, 0], [1, 3], [5, -1], [2, 6]]
    -> [[2], [4], [3], [8]]
"""

from __future__ import annotations

from typing import Any

import torch

from .. import _library

_UNPERMUTE = _library.info("unpermute")


def _check(
    rows_CH: torch.Tensor,
    weights_TK: torch.Tensor | None,
    slot_of_row_C: torch.Tensor,
    row_of_slot_TK: torch.Tensor,
    group: str,
) -> Any:
    return _UNPERMUTE.check(rows_CH, weights_TK, slot_of_row_C, row_of_slot_TK)


def _reference(
    rows_CH: torch.Tensor,
    weights_TK: torch.Tensor | None,
    slot_of_row_C: torch.Tensor,
    row_of_slot_TK: torch.Tensor,
    group: str,
) -> torch.Tensor:
    return _UNPERMUTE.reference(rows_CH, weights_TK, slot_of_row_C, row_of_slot_TK)


def _fake(
    rows_CH: torch.Tensor,
    weights_TK: torch.Tensor | None,
    slot_of_row_C: torch.Tensor,
    row_of_slot_TK: torch.Tensor,
    group: str,
) -> torch.Tensor:
    return _UNPERMUTE.fake(rows_CH, weights_TK, slot_of_row_C, row_of_slot_TK)


_library.define(
    "unpermute_in_window(Tensor rows_CH, Tensor? weights_TK, Tensor slot_of_row_C,"
    " Tensor row_of_slot_TK, str group) -> Tensor",
    check=_check,
    reference=_reference,
    fake=_fake,
    private=True,
)
