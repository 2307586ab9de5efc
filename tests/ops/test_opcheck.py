"""`torch.library.opcheck`, all four tests, of every operator: one process and two ranks."""

from __future__ import annotations

import pytest
import torch

from tests.ranks import run_on_ranks

from .checks import check_opcheck, world
from .samples import COLLECTIVE_OPS, OPS, Sizes

SIZES = {
    "exact": Sizes(),
    "capacity": Sizes(capacity=True),
    "no_tokens": Sizes(num_tokens=0),
    "bf16": Sizes(dtype=torch.bfloat16),
}


def _cases() -> list[object]:
    return [
        pytest.param(op, sizes, id=f"{op}-{name}")
        for op in OPS
        for name, sizes in SIZES.items()
        if op in COLLECTIVE_OPS or name != "capacity"
    ]


@pytest.mark.parametrize(("op", "sizes"), _cases())
def test_op_opcheck(op: str, sizes: Sizes) -> None:
    check_opcheck(op, sizes, first_only=sizes is not SIZES["exact"])


def _opcheck_on_rank(rank: int, op: str, capacity: bool) -> None:
    sizes = Sizes(num_tokens=5 * rank, capacity=capacity, group_name=world())
    check_opcheck(op, sizes, first_only=True)


@pytest.mark.dist
@pytest.mark.parametrize("capacity", [False, True], ids=["exact", "capacity"])
@pytest.mark.parametrize("op", COLLECTIVE_OPS)
def test_op_opcheck_on_two_ranks(op: str, capacity: bool) -> None:
    run_on_ranks(2, _opcheck_on_rank, op, capacity)
