"""What draws random numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx import Graph, Node

from fx_passes.aliases import draws, may_change

ATEN = torch.ops.aten
FLASH = ATEN._scaled_dot_product_flash_attention.default
FORWARD = ATEN._flash_attention_forward.default
EFFICIENT = ATEN._scaled_dot_product_efficient_attention.default


def call(target: Any, num_tensors: int, *args: Any, **kwargs: Any) -> Node:
    graph = Graph()
    tensors = [graph.placeholder(f"tensor_{number}") for number in range(num_tensors)]
    return graph.call_function(target, (*tensors, *args), kwargs)


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        pytest.param(call(FLASH, 3), False, id="by default"),
        pytest.param(call(FLASH, 3, 0.0, True), False, id="none"),
        pytest.param(call(FLASH, 3, 0.1), True, id="given"),
        pytest.param(call(EFFICIENT, 4, True, dropout_p=0.0), False, id="none by name"),
        pytest.param(call(EFFICIENT, 4, True, dropout_p=0.1), True, id="given by name"),
        pytest.param(call(FORWARD, 5, 4, 4, 0, True, False), False, id="none of the forward alone"),
        pytest.param(call(ATEN.rand_like.default, 1), True, id="rand_like"),
        pytest.param(call(ATEN.native_dropout.default, 1, 0.0, True), True, id="another argument"),
        pytest.param(call(ATEN.mm.default, 2), False, id="mm"),
    ],
)
def test_attention_draws_for_its_dropout_alone(node: Node, expected: bool) -> None:
    assert draws(node) == expected
    assert may_change(node) == expected, "a generator's state, of none of its inputs"


def test_what_writes_may_change_its_input() -> None:
    node = call(ATEN.add_.Tensor, 2)
    assert may_change(node)
    assert not draws(node)
