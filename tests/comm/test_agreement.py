"""Agreement, engines and groups: what ranks share before they exchange anything."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from moe_ops import comm
from moe_ops.comm.agreement import agree
from tests.ranks import expect_error_on_ranks, run_on_ranks

WORLD_SETUP = {"max_tokens": 8, "hidden_size": 16, "dtype": torch.float32}


def _agree(rank: int, settings: list, error: str | None) -> str:
    def check() -> object:
        if error and rank == 1:
            raise {"ValueError": ValueError, "TypeError": TypeError}[error]("some: bad, got 3")
        return settings[rank]

    agree("some", dist.group.WORLD.group_name, check)
    return "agreed"


@pytest.mark.dist
def test_equal_settings_agree() -> None:
    for _ in range(3):
        assert run_on_ranks(2, _agree, [(1, "a"), (1, "a")], None) == ["agreed"] * 2


@pytest.mark.dist
def test_different_settings_are_an_error_everywhere() -> None:
    for rank, (name, text) in enumerate(expect_error_on_ranks(2, _agree, [(1, 2), (1, 3)], None)):
        assert name == "ValueError"
        assert text.startswith("some: every rank of group")
        assert f"got on rank {rank}" in text
        assert "rank 0: some(1, 2); rank 1: some(1, 3)" in text


@pytest.mark.dist
@pytest.mark.parametrize("error", ["ValueError", "TypeError"])
def test_error_on_one_rank_is_an_error_everywhere(error: str) -> None:
    first, second = expect_error_on_ranks(2, _agree, [1, 1], error)
    assert first[0] == "ValueError"
    assert f"rank 1: {error}: some: bad, got 3" in first[1]
    assert second == (error, "some: bad, got 3")


def _different_operators(rank: int) -> None:
    agree(["first", "second"][rank], dist.group.WORLD.group_name, lambda: 1)


@pytest.mark.dist
def test_different_operators_are_an_error_everywhere() -> None:
    for _, text in expect_error_on_ranks(2, _different_operators):
        assert "rank 0: first1; rank 1: second1" in text


def test_one_process_agrees_with_itself() -> None:
    agree("some", "", lambda: 1)
    with pytest.raises(ValueError, match="group must name an initialised process group, got 'x'"):
        agree("some", "x", lambda: 1)


def _setup(rank: int, changes: dict) -> tuple[str, str, int, int, str]:
    group = dist.group.WORLD
    name = comm.setup(group, **{**WORLD_SETUP, **(changes if rank == 1 else {})})
    where = comm.group_name_of(group)
    return name, comm.engine(group), comm.group_size(where), comm.group_rank(where), where


@pytest.mark.dist
def test_setup_says_which_engine_runs() -> None:
    for rank, result in enumerate(run_on_ranks(2, _setup, {})):
        assert result[:4] == ("gloo", "gloo", 2, rank)


@pytest.mark.dist
@pytest.mark.parametrize(
    "changes",
    [
        {"max_tokens": 0},
        {"hidden_size": 0},
        {"num_sms": 0},
        {"engine": "nvlink"},
        {"max_tokens": 9},
        {"dtype": torch.bfloat16},
    ],
    ids=str,
)
def test_setup_rejects_bad_settings_on_every_rank(changes: dict) -> None:
    for name, text in expect_error_on_ranks(2, _setup, changes):
        assert name == "ValueError"
        assert text.startswith("setup: ")
        assert "got" in text


def test_setup_without_a_group() -> None:
    assert comm.setup(None, **WORLD_SETUP) == "none"
    assert comm.engine(None) == "none"
    assert (comm.group_size(""), comm.group_rank("")) == (1, 0)
    with pytest.raises(ValueError, match="setup: timeout_s must be positive, got 0"):
        comm.setup(None, **WORLD_SETUP, timeout_s=0)


def test_engine_from_the_environment_replaces_auto_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_OPS_ENGINE", "pigeon")
    with pytest.raises(ValueError, match=r"setup: engine must be .*, got 'pigeon'"):
        comm.setup(None, **WORLD_SETUP)
    monkeypatch.setenv("MOE_OPS_ENGINE", "nvlink")
    with pytest.raises(ValueError, match=r"'nvlink' cannot carry .* its backend is 'none'"):
        comm.setup(None, **WORLD_SETUP)
    assert comm.setup(None, **WORLD_SETUP, engine="none") == "none"


def test_group_that_does_not_exist() -> None:
    with pytest.raises(ValueError, match="group must name an initialised process group"):
        comm.engine("nobody")
    with pytest.raises(TypeError, match=r"group: must be a ProcessGroup .*, got 3"):
        comm.group_name_of(3)
    assert set(comm.available_engines()) == {"gloo", "nccl", "nvlink", "deep_ep"}
