"""Experts on a mesh: whole ones spread over "ep", each one's F over "etp"."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_ops.nn.config import DISPATCHERS

from ..ranks import run_on_ranks
from .layers import capacity_fields, check_layer, make_config

NUM_TOKENS = (5, 0, 9, 3)  # one rank starves
AXES = {
    "ep 4": {"ep": 4, "etp": 1, "tp": 2},
    "ep 2, etp 2": {"ep": 2, "etp": 2, "tp": 4},
    "etp 4": {"ep": 1, "etp": 4},
    "etp 2 outside": {"ep": 2, "etp": 2, "order": "cp-ep-tp-dp-pp"},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "bias": {"bias": True},
    "bias, unpermute": {"bias": True, "weights_at": "unpermute"},
    "relu2": {"activation": "relu2", "bias": True},
    "padded": {
        "router": {"expert_capacity_factor": 8.0, "pad_to_capacity": True},
        "max_tokens": 9,
    },
}
SIZES = {"ffn_hidden_size": 8}


@pytest.mark.dist
@pytest.mark.parametrize("mode", ["exact", "capacity"])
@pytest.mark.parametrize("dispatcher", DISPATCHERS)
@pytest.mark.parametrize("axes", AXES.values(), ids=AXES)
def test_experts_on_a_mesh_match_oracle(axes: dict[str, Any], dispatcher: str, mode: str) -> None:
    sizes = capacity_fields(9) if mode == "capacity" else {}
    config = make_config(dispatcher=dispatcher, **sizes, **SIZES)
    run_on_ranks(4, check_layer, config, NUM_TOKENS, torch.float64, True, None, None, axes)


@pytest.mark.dist
@pytest.mark.parametrize("dispatcher", DISPATCHERS)
@pytest.mark.parametrize("name", OPTIONS)
def test_options_on_a_mesh_match_oracle(name: str, dispatcher: str) -> None:
    config = make_config(dispatcher=dispatcher, **OPTIONS[name], **SIZES)
    axes = AXES["ep 2, etp 2"]
    run_on_ranks(4, check_layer, config, NUM_TOKENS, torch.float64, True, None, None, axes)


@pytest.mark.dist
@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_experts_on_a_mesh_compile_fullgraph(dispatcher: str) -> None:
    config = make_config(dispatcher=dispatcher, **capacity_fields(9), **SIZES)
    axes = AXES["ep 2, etp 2"]
    run_on_ranks(4, check_layer, config, NUM_TOKENS, torch.float64, True, "aot_eager", None, axes)
