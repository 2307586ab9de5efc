"""When the engine `nvlink` is chosen, and what is said where it is not."""

from __future__ import annotations

import logging
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from moe_ops import comm
from moe_ops.comm import engines, nvlink
from tests.ranks import expect_error_on_ranks, run_on_ranks

SETUP = {"max_tokens": 4, "hidden_size": 8, "dtype": torch.bfloat16}


def _obstacle(rank: int, hosts: list[str], gpus: list[str], why: list[str | None]) -> str | None:
    with (
        mock.patch.object(nvlink, "unavailable", return_value=why[rank]),
        mock.patch.object(nvlink, "_where", return_value=(hosts[rank], gpus[rank])),
        mock.patch.object(nvlink, "_pair_without_access", return_value=None),
    ):
        return nvlink.obstacle(str(dist.group.WORLD.group_name), SETUP["dtype"])


@pytest.mark.parametrize(
    ("hosts", "gpus", "why", "expected"),
    [
        (["a", "a"], ["0", "1"], [None, None], None),
        (["a", "b"], ["0", "0"], [None, None], "its ranks are on 2 hosts"),
        (["a", "a"], ["0", "0"], [None, None], "two ranks share a GPU"),
        (["a", "a"], ["0", ""], [None, "no GPU"], "rank 1: no GPU"),
    ],
    ids=["none", "hosts", "shared", "missing"],
)
def test_obstacle_is_the_same_on_every_rank(
    hosts: list[str], gpus: list[str], why: list[str | None], expected: str | None
) -> None:
    assert run_on_ranks(2, _obstacle, hosts, gpus, why) == [expected] * 2


def _obstacle_of_float64(rank: int) -> str | None:
    with mock.patch.object(nvlink, "unavailable", return_value=None):
        return nvlink.obstacle(str(dist.group.WORLD.group_name), torch.float64)


def test_rows_of_other_dtypes_are_an_obstacle() -> None:
    for why in run_on_ranks(2, _obstacle_of_float64):
        assert "rows are torch.float64" in why


def _setup_by_name(rank: int) -> None:
    comm.setup(dist.group.WORLD, **SETUP, engine="nvlink")


def test_an_engine_asked_for_by_name_that_cannot_run_is_an_error_on_every_rank() -> None:
    for kind, text in expect_error_on_ranks(2, _setup_by_name):
        assert kind == "ValueError"
        assert "setup: engine 'nvlink' cannot carry group" in text and "'gloo'" in text


def test_auto_falls_back_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with (
        mock.patch.object(nvlink, "obstacle", return_value="its ranks are on 2 hosts"),
        mock.patch.object(engines, "group_rank", return_value=0),
        caplog.at_level(logging.INFO, "moe_ops.comm"),
    ):
        assert engines._choose("some", "auto", "nccl", torch.bfloat16) == "nccl"
    (line,) = caplog.messages
    assert "falls back from nvlink to nccl: its ranks are on 2 hosts" in line


def test_a_backend_asked_for_by_name_is_taken() -> None:
    with mock.patch.object(nvlink, "obstacle", side_effect=AssertionError):
        assert engines._choose("some", "nccl", "nccl", torch.bfloat16) == "nccl"
        assert engines._choose("some", "auto", "gloo", torch.bfloat16) == "gloo"
    with mock.patch.object(nvlink, "obstacle", return_value=None):
        assert engines._choose("some", "auto", "nccl", torch.bfloat16) == "nvlink"
