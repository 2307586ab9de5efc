"""Each family's layer of transformers, small and random, against ours with its weights."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_ops.nn import MoE
from moe_ops.testing import assert_close
from moe_ops.weights import config_of, load_experts

from .checkpoints import FAMILIES, E, F, config_fields

pytest.importorskip("transformers", reason="optional package transformers is not installed")

LAYERS = {
    "mixtral": "Mixtral.SparseMoeBlock",
    "qwen2_moe": "Qwen2Moe.SparseMoeBlock",
    "qwen3_moe": "Qwen3Moe.SparseMoeBlock",
    "qwen3_next": "Qwen3Next.SparseMoeBlock",
    "olmoe": "Olmoe.SparseMoeBlock",
    "deepseek_v2": "DeepseekV2.Moe",
    "deepseek_v3": "DeepseekV3.MoE",
    "glm4_moe": "Glm4Moe.MoE",
    "gpt_oss": "GptOss.MLP",
}


def make_layer(family: str) -> tuple[Any, Any]:
    """(config, layer) of transformers, each parameter and buffer random."""
    package = f"transformers.models.{family}"
    name, kind = LAYERS[family].split(".")
    config_class = getattr(
        importlib.import_module(f"{package}.configuration_{family}"), f"{name}Config"
    )
    config = config_class(**config_fields(family), num_hidden_layers=2)
    config._experts_implementation = "eager"
    layer = getattr(importlib.import_module(f"{package}.modeling_{family}"), name + kind)(config)
    for tensor in (*layer.parameters(), *layer.buffers()):
        torch.nn.init.normal_(tensor, std=0.7)
    return config, layer


def apart(family: str, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The names of files instead of the fused tensors."""
    gate, up, down = (
        ("w1", "w3", "w2") if family == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    )
    rest = {name: tensor for name, tensor in state.items() if not name.startswith("experts.")}
    for expert in range(E):
        both = state["experts.gate_up_proj"][expert]
        rest[f"experts.{expert}.{gate}.weight"] = both[:F]
        rest[f"experts.{expert}.{up}.weight"] = both[F:]
        rest[f"experts.{expert}.{down}.weight"] = state["experts.down_proj"][expert]
    return rest


@pytest.mark.parametrize("family", FAMILIES)
def test_layer_matches(family: str) -> None:
    config, layer = make_layer(family)
    x = torch.randn(2, 9, config.hidden_size)
    grad = torch.randn_like(x)
    results = []
    states = [layer.state_dict()]
    if family != "gpt_oss":
        states.append(apart(family, states[0]))
    for state in states:
        moe = MoE(config_of(config))
        load_experts(moe, state, family=family)
        results.append(step(moe, x, grad))
    y, grad_x = step(layer, x, grad)
    for ours_y, ours_grad_x in results:
        assert_close("y", ours_y, y)
        assert_close("x.grad", ours_grad_x, grad_x)


def step(layer: Any, x: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and the gradient of x."""
    x = x.clone().requires_grad_()
    y = layer(x)
    y = y[0] if isinstance(y, tuple) else y
    y.backward(grad)
    assert x.grad is not None
    return y, x.grad


def test_readme_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    readme = Path(__file__).parents[2] / "README.md"
    blocks = readme.read_text().split("```python\n")
    (code,) = [code.partition("```")[0] for code in blocks if "load_experts(" in code]
    exec(compile(code, readme.name, "exec"), {})
    assert float(capsys.readouterr().out.split()[-1]) < 1e-5
