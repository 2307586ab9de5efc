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


FINE = nvlink._Told(None, "a", "gpu 0", 132, ())
SECOND = FINE._replace(gpu="gpu 1")


def _obstacle(rank: int, told: list[nvlink._Told], dtype: torch.dtype) -> str | None:
    with mock.patch.object(nvlink, "_about_this_rank", return_value=told[rank]):
        return nvlink.obstacle(str(dist.group.WORLD.group_name), dtype)


@pytest.mark.parametrize(
    ("second", "dtype", "expected"),
    [
        (SECOND, torch.bfloat16, None),
        (FINE._replace(host="b"), torch.bfloat16, "its ranks are on 2 hosts"),
        (FINE, torch.bfloat16, "two ranks share a GPU"),
        (FINE._replace(why_not="no GPU"), torch.bfloat16, "rank 1: no GPU"),
        (
            SECOND._replace(out_of_reach=("gpu 0",)),
            torch.bfloat16,
            "the GPU of rank 1 cannot map the memory of rank 0's",
        ),
        (SECOND._replace(out_of_reach=("gpu 7",)), torch.bfloat16, None),
        (
            SECOND._replace(num_sms=78),
            torch.bfloat16,
            "a GPU has 78 multiprocessors, fewer than 128",
        ),
        (SECOND, torch.float64, f"rows are torch.float64, not one of {nvlink.DTYPES}"),
    ],
    ids=["none", "hosts", "shared", "missing", "reach", "elsewhere", "small", "dtype"],
)
def test_obstacle_is_the_same_on_every_rank(
    second: nvlink._Told, dtype: torch.dtype, expected: str | None
) -> None:
    assert run_on_ranks(2, _obstacle, [FINE, second], dtype) == [expected] * 2


def _obstacle_without_a_gpu(rank: int) -> str | None:
    return nvlink.obstacle(str(dist.group.WORLD.group_name), torch.bfloat16)


@pytest.mark.skipif(torch.cuda.is_available(), reason="no GPU is the point")
def test_ranks_without_a_gpu_say_so() -> None:
    assert run_on_ranks(2, _obstacle_without_a_gpu) == ["rank 0: no GPU; rank 1: no GPU"] * 2


def _setup_by_name(rank: int) -> None:
    comm.setup(dist.group.WORLD, **SETUP, engine="nvlink")


def test_an_engine_asked_for_by_name_that_cannot_run_is_an_error_on_every_rank() -> None:
    for kind, text in expect_error_on_ranks(2, _setup_by_name):
        assert kind == "ValueError"
        assert "setup: engine 'nvlink' cannot carry group" in text and "'gloo'" in text


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("num_sms", 65, "setup: num_sms must be at most 64, got 65"),
        ("max_tokens", 1 << 24, "setup: max_tokens must be at most 16777214, got 16777216"),
        ("window_bytes", -1, "setup: window_bytes must not be negative, got -1"),
    ],
)
def test_setup_refuses_what_no_workspace_holds(name: str, value: int, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        comm.setup(None, **{**SETUP, name: value})


class _Group:
    """Stands for a group of NCCL."""


@pytest.mark.parametrize(
    ("second", "reason", "first_level"),
    [
        (FINE, "two ranks share a GPU", logging.WARNING),
        (FINE._replace(host="b"), "its ranks are on 2 hosts", logging.INFO),
    ],
    ids=["one host", "two hosts"],
)
def test_auto_falls_back_with_one_warning(
    second: nvlink._Told, reason: str, first_level: int, caplog: pytest.LogCaptureFixture
) -> None:
    (obstacle, _) = run_on_ranks(2, _obstacle, [FINE, second], torch.bfloat16)
    assert obstacle == reason
    first, other = _Group(), _Group()
    with (
        mock.patch.object(nvlink, "obstacle", return_value=obstacle),
        mock.patch.object(engines, "group_rank", return_value=0),
        mock.patch.object(engines, "resolve", side_effect=(first, first, other)),
        caplog.at_level(logging.INFO, "moe_ops.comm"),
    ):
        for _ in range(3):
            assert engines._choose("some", "auto", "nccl", torch.bfloat16) == "nccl"
    assert [record.levelno for record in caplog.records] == [first_level, logging.INFO, first_level]
    assert {record.message for record in caplog.records} == {
        f"group 'some': falls back from nvlink to nccl: {reason}"
    }


def test_a_backend_asked_for_by_name_is_taken() -> None:
    with mock.patch.object(nvlink, "obstacle", side_effect=AssertionError):
        assert engines._choose("some", "nccl", "nccl", torch.bfloat16) == "nccl"
        assert engines._choose("some", "auto", "gloo", torch.bfloat16) == "gloo"
    with mock.patch.object(nvlink, "obstacle", return_value=None):
        assert engines._choose("some", "auto", "nccl", torch.bfloat16) == "nvlink"
