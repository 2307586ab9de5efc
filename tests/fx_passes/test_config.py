"""Settings of the passes: what they take, from keywords and from files."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

import fx_passes
from fx_passes.config import as_json, config_of, read
from fx_passes.cost_model import FixedCosts, cost_model
from fx_passes.defer_wgrad import DeferWgrad
from fx_passes.overlap_shared_experts import OverlapSharedExperts
from fx_passes.pipeline import name_of_pass

from .compiled import POST_GRAD

CONFIG = fx_passes.PassConfig(
    chunk_exchange=4,
    num_comm_sms=8,
    lower=False,
    defer_wgrad=False,
    overlap_shared_experts=OverlapSharedExperts(max_bytes=7, min_us=2.5),
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tuned.json"


def test_files_hold_whole_configurations(path: Path) -> None:
    path.write_text(json.dumps(as_json(CONFIG) | {"measured": {"device": "cpu"}}))
    assert read(path) == CONFIG
    assert hash(read(path)) == hash(CONFIG), "bounds are of their class"


def test_overrides_win_over_files(path: Path) -> None:
    path.write_text(json.dumps({"chunk_exchange": 4, "lower": False, "num_comm_sms": None}))
    for config in (path, str(path)):
        settings = fx_passes.options(config, chunk_exchange=2)[POST_GRAD].config
        assert settings == fx_passes.PassConfig(chunk_exchange=2, lower=False)


def test_overrides_leave_the_rest() -> None:
    assert config_of(CONFIG, {"lower": True}) == dataclasses.replace(CONFIG, lower=True)
    bounds = {"min_us": 3}
    assert config_of(None, {"defer_wgrad": bounds}).defer_wgrad == DeferWgrad(min_us=3)


WRONG = [
    ("chunk_exchange", 0, "must be a positive number, got 0"),
    ("chunk_exchange", -1, "must be a positive number, got -1"),
    ("chunk_exchange", 1.5, "must be a positive number, got 1.5"),
    ("chunk_exchange", True, "must be a positive number, got True"),
    ("expected_rows", 0, "must be None or a positive number, got 0"),
    ("cost_model", "h200", "must be None or a CostModel, got 'h200'"),
    ("num_comm_sms", 65, "must be None or a number from 1 to 64, got 65"),
    ("num_comm_sms", 0, "must be None or a number from 1 to 64, got 0"),
    ("num_comm_sms", "8", "must be None or a number from 1 to 64, got '8'"),
    ("lower", 1, "must be True or False, got 1"),
    ("split_exchange", "yes", "must be True or False, got 'yes'"),
    ("defer_wgrad", 1, r"must be True, False or bounds \[max_bytes, min_us\], got 1"),
    ("overlap_shared_experts", None, r"or bounds \[max_bytes, min_us\], got None"),
    ("defer_wgrad", {"most": 1}, r"must be among \[max_bytes, min_us\], got most"),
    ("defer_wgrad", {"max_bytes": 1.5}, "must be a whole number of 0 or more, got 1.5"),
    ("defer_wgrad", {"max_bytes": True}, "must be a whole number of 0 or more, got True"),
    ("overlap_shared_experts", {"min_us": -1}, "must be a number of 0 or more, got -1"),
    ("overlap_shared_experts", {"min_us": "1"}, "must be a number of 0 or more, got '1'"),
]


@pytest.mark.parametrize(("name", "value", "message"), WRONG)
def test_rejects_values(name: str, value: Any, message: str, path: Path) -> None:
    for source, make in (
        ("options", lambda: fx_passes.options(**{name: value})),
        ("options", lambda: fx_passes.PassConfig(**{name: value})),
        ("tuned.json", lambda: fx_passes.options(path)),
    ):
        path.write_text(json.dumps({name: value}))
        with pytest.raises(ValueError, match=rf"{source}: .*{name}.* {message}"):
            make()


def test_rejects_bounds_of_another_pass() -> None:
    with pytest.raises(ValueError, match="defer_wgrad must be True, False or bounds"):
        fx_passes.options(defer_wgrad=OverlapSharedExperts())
    with pytest.raises(ValueError, match="min_us of defer_wgrad must be a number of 0 or more"):
        fx_passes.options(defer_wgrad=DeferWgrad(min_us=float("nan")))


def test_rejects_unknown_settings(path: Path) -> None:
    fields = ", ".join(field.name for field in dataclasses.fields(fx_passes.PassConfig))
    known = rf"settings must be among \[{fields}\], got"
    with pytest.raises(ValueError, match=rf"options: {known} fuse_all, fuse_some"):
        fx_passes.options(fuse_some=True, fuse_all=True)
    path.write_text('{"chunks": 4}')
    with pytest.raises(ValueError, match=rf"tuned.json: {known} chunks"):
        fx_passes.options(path)


@pytest.mark.parametrize("config", [{"lower": True}, 3, ["tuned.json"]], ids=str)
def test_rejects_what_is_no_configuration(config: Any) -> None:
    kind = type(config).__name__
    rule = f"options: config must be a PassConfig or a path, got a {kind}; pass settings by keyword"
    with pytest.raises(ValueError, match=rule):
        fx_passes.options(config)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", r"must hold one JSON object, got \[1\]"),
        ('{"lower": tru', "must hold JSON, got '{\"lower\": tru' "),
        ("", "must hold JSON, got '' "),
    ],
)
def test_rejects_what_is_no_json_object(text: str, message: str, path: Path) -> None:
    path.write_text(text)
    with pytest.raises(ValueError, match=f"tuned.json: {message}"):
        fx_passes.options(path)


def test_costs_reach_the_passes_that_ask() -> None:
    costs = FixedCosts({"mm": 1e-6})
    given = fx_passes.options(cost_model=costs)[POST_GRAD]
    told = fx_passes.options(expected_rows=40)[POST_GRAD]
    for composite, found in ((given, costs), (told, cost_model(expected_rows=40))):
        asking = [p for p in composite.passes if "costs" in getattr(p, "keywords", {})]
        assert [name_of_pass(p) for p in asking] == ["overlap_shared_experts", "defer_wgrad"]
        assert [p.keywords["costs"] for p in asking] == [found, found]
    other = fx_passes.options(cost_model=FixedCosts({"mm": 2e-6}))[POST_GRAD]
    uuids = {composite.uuid() for composite in (given, told, other)}
    assert len(uuids) == 3
    assert fx_passes.options(expected_rows=40)[POST_GRAD] == told


def test_rows_belong_to_the_cost_model_that_is_given() -> None:
    with pytest.raises(ValueError, match="expected_rows must be left to the cost_model"):
        fx_passes.options(cost_model=FixedCosts({}), expected_rows=40)
