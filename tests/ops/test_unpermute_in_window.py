"""The sums are unpermute's, wherever they lie."""

from __future__ import annotations

import torch

from moe_ops.testing import assert_equal, make_ids

OPS = torch.ops.moe_ops


def test_sums_are_those_of_unpermute() -> None:
    ids_TK = make_ids(9, 3, 4, none_fraction=0.3)
    slots, rows, _ = OPS.sort_slots(ids_TK, 4, None, None)
    rows_CH, weights_TK = torch.randn(27, 5), torch.rand(9, 3)
    for weights in (None, weights_TK):
        found = OPS.unpermute_in_window(rows_CH, weights, slots, rows, "")
        assert_equal("x_TH", found, OPS.unpermute(rows_CH, weights, slots, rows))
