"""Rows on every wire arrive on the engine `nvlink` as on NCCL, bit for bit."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from moe_ops import comm
from moe_ops.comm.wire import FORMATS
from moe_ops.testing import assert_equal

from . import DTYPES, MODES, OPS, Case, needs_two_gpus, plan_of, run_op
from .ranks import groups, run_on_gpus
from .test_exchange import CASES

pytestmark = needs_two_gpus


@pytest.mark.parametrize("group", ["nvlink", "inbox"])
@pytest.mark.parametrize("mode", MODES)
def test_engines_agree_on_every_wire(mode: str, group: str) -> None:
    for name in ("plain", "own rank empty", "zipf", "K3", "wide"):
        run_on_gpus(_wires_agree, dataclasses.replace(CASES[name], mode=mode), group)


def _wires_agree(rank: int, case: Case, name: str) -> None:
    """Several times over, so that the ranks run apart."""
    group, nccl = getattr(groups(), name), groups().nccl
    plan, expected_plan = plan_of(case, rank, group), plan_of(case, rank, nccl)
    for dtype, wire in itertools.product(DTYPES, FORMATS):
        x_TH, weights_TK = case.inputs(rank).x_TH.to(dtype) / 7, case.inputs(rank).weights_TK
        sent = (x_TH, weights_TK, expected_plan.tensors(), comm.group_name_of(nccl), wire)
        for _ in range(3):
            args = (x_TH, weights_TK, plan.tensors(), comm.group_name_of(group), wire)
            for value, wanted in zip(run_op("dispatch", group, *args), OPS.dispatch(*sent)):
                assert_equal(f"{case}: {wire}, {dtype}", value, wanted)
