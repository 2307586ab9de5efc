"""Agreement, engines and groups: what ranks share before they exchange anything."""

from __future__ import annotations

import datetime
import math

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
        {"timeout_s": math.inf},
        {"timeout_s": math.nan},
    ],
    ids=str,
)
def test_setup_rejects_bad_settings_on_every_rank(changes: dict) -> None:
    for name, text in expect_error_on_ranks(2, _setup, changes):
        assert name == "ValueError"
        assert text.startswith("setup: ")
        assert "got" in text


WRONG_TYPES = [
    ("max_tokens", 8.5, "max_tokens must be a whole number, got 8.5"),
    ("max_tokens", None, "max_tokens must be a whole number, got None"),
    ("hidden_size", "16", "hidden_size must be a whole number, got '16'"),
    ("num_sms", True, "num_sms must be a whole number, got True"),
    ("window_bytes", 1e9, "window_bytes must be a whole number, got 1000000000.0"),
    ("dtype", "float32", "dtype must be a torch.dtype, got 'float32'"),
    ("timeout_s", "60", "timeout_s must be a number, got '60'"),
    ("timeout_s", None, "timeout_s must be a number, got None"),
]


@pytest.mark.parametrize(("name", "value", "message"), WRONG_TYPES)
def test_setup_rejects_wrong_types(name: str, value: object, message: str) -> None:
    with pytest.raises(TypeError, match=f"setup: {message}"):
        comm.setup(None, **{**WORLD_SETUP, name: value})


@pytest.mark.dist
@pytest.mark.parametrize(("name", "value", "message"), WRONG_TYPES)
def test_setup_rejects_wrong_types_on_every_rank(name: str, value: object, message: str) -> None:
    first, second = expect_error_on_ranks(2, _setup, {name: value})
    assert first[0] == "ValueError" and f"rank 1: TypeError: setup: {message}" in first[1]
    assert second == ("TypeError", f"setup: {message}")


def _timeouts(rank: int) -> list[datetime.timedelta]:
    """Of the group's own collectives: after a setup, and after one that is refused."""
    group, found = dist.new_group([0, 1]), []
    for timeout_s in (77, math.inf):
        try:
            comm.setup(group, **WORLD_SETUP, timeout_s=timeout_s)
        except ValueError:
            assert timeout_s == math.inf
        found.append(group._get_backend(torch.device("cpu")).options._timeout)
    dist.destroy_process_group(group)
    return found


@pytest.mark.dist
def test_setup_sets_the_timeout_of_every_collective() -> None:
    assert run_on_ranks(2, _timeouts) == [[datetime.timedelta(seconds=77)] * 2] * 2


def test_setup_without_a_group() -> None:
    assert comm.setup(None, **WORLD_SETUP) == "none"
    assert comm.engine(None) == "none"
    assert (comm.group_size(""), comm.group_rank("")) == (1, 0)
    for timeout_s in (0, math.inf, math.nan):
        rule = f"setup: timeout_s must be positive and finite, got {timeout_s}"
        with pytest.raises(ValueError, match=rule):
            comm.setup(None, **WORLD_SETUP, timeout_s=timeout_s)


def test_engine_from_the_environment_replaces_auto_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_OPS_ENGINE", "pigeon")
    with pytest.raises(ValueError, match=r"setup: engine must be .*, got 'pigeon'"):
        comm.setup(None, **WORLD_SETUP)
    monkeypatch.setenv("MOE_OPS_ENGINE", "nvlink")
    with pytest.raises(ValueError, match=r"'nvlink' cannot carry .* its backend is 'none'"):
        comm.setup(None, **WORLD_SETUP)
    assert comm.setup(None, **WORLD_SETUP, engine="none") == "none"
    monkeypatch.setenv("MOE_OPS_ENGINE", "")
    assert comm.setup(None, **WORLD_SETUP) == "none", "empty: unset"


def test_group_that_does_not_exist() -> None:
    with pytest.raises(ValueError, match="group must name an initialised process group"):
        comm.engine("nobody")
    with pytest.raises(TypeError, match=r"group: must be a ProcessGroup .*, got 3"):
        comm.group_name_of(3)
    assert set(comm.available_engines()) == {"gloo", "nccl", "nvlink", "deep_ep"}
