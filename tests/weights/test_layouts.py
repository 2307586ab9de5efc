from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_ops.testing import assert_equal
from moe_ops.weights import LAYOUTS, pack_weights, unpack_weights

E, F, H = 3, 4, 5


def make_weights(bias: bool) -> dict[str, torch.Tensor]:
    weights = {"w13": torch.randn(E, 2 * F, H), "w2": torch.randn(E, H, F)}
    if bias:
        weights |= {"b13": torch.randn(E, 2 * F), "b2": torch.randn(E, H)}
    return weights


def gate_and_up(packed: dict[str, torch.Tensor], layout: str, x_EH: torch.Tensor) -> Any:
    """What a library that reads this layout computes before the activation, [E, F] each."""
    if layout.startswith("split"):
        matrices = packed["w1"], packed["w3"]
        if layout == "split":
            matrices = tuple(matrix.mT for matrix in matrices)
        gate, up = (torch.einsum("eh,ehf->ef", x_EH, matrix) for matrix in matrices)
        return gate + packed["b1"], up + packed["b3"]
    equation = "eh,ehg->eg" if layout.endswith("transposed") else "eh,egh->eg"
    both = torch.einsum(equation, x_EH, packed["w13"]) + packed["b13"]
    if layout.startswith("interleaved"):
        return both[:, ::2], both[:, 1::2]
    first, second = both[:, :F], both[:, F:]
    return (second, first) if layout == "up_gate" else (first, second)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_packed_weights_mean_the_same(layout: str) -> None:
    weights = {name: tensor.double() for name, tensor in make_weights(bias=True).items()}
    x_EH = torch.randn(E, H, dtype=torch.float64)
    packed = pack_weights(**weights, layout=layout)
    gate, up = gate_and_up(packed, layout, x_EH)
    expected = torch.einsum("eh,egh->eg", x_EH, weights["w13"]) + weights["b13"]
    torch.testing.assert_close(torch.cat([gate, up], 1), expected)
    down = packed["w2"] if layout.endswith("transposed") else packed["w2"].mT
    assert_equal("w2", down.mT, weights["w2"])
    assert_equal("b2", packed["b2"], weights["b2"])


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_round_trip_is_bitwise(layout: str, bias: bool) -> None:
    weights = make_weights(bias)
    weights["w13"] = weights["w13"].bfloat16()
    packed = pack_weights(**weights, layout=layout)
    back = unpack_weights(packed, layout=layout)
    assert back.keys() == weights.keys()
    for name, tensor in weights.items():
        assert_equal(name, back[name], tensor)
    assert all(tensor.is_contiguous() for tensor in (*packed.values(), *back.values()))


def test_worked_example() -> None:
    weights = torch.tensor([[[1], [2], [3], [4]]]), torch.zeros(1, 1, 2)
    packed = {layout: pack_weights(*weights, layout=layout) for layout in LAYOUTS}
    assert packed["gate_up"]["w13"].tolist() == [[[1], [2], [3], [4]]]
    assert packed["up_gate"]["w13"].tolist() == [[[3], [4], [1], [2]]]
    assert packed["split"]["w1"].tolist() == [[[1], [2]]]
    assert packed["split_transposed"]["w3"].tolist() == [[[3, 4]]]
    assert packed["interleaved"]["w13"].tolist() == [[[1], [3], [2], [4]]]
    assert packed["interleaved_transposed"]["w13"].tolist() == [[[1, 3, 2, 4]]]


def test_one_layout_to_another() -> None:
    weights = make_weights(bias=True)
    split = pack_weights(**weights, layout="split")
    turned = pack_weights(**unpack_weights(split, layout="split"), layout="interleaved_transposed")
    expected = pack_weights(**weights, layout="interleaved_transposed")
    assert all(torch.equal(turned[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"w13": torch.zeros(E, 2 * F + 1, H)}, r"w13 must have shape \(3, 8, 5\) .* \(3, 9, 5\)"),
        ({"b13": torch.zeros(E, F)}, r"b13 must have shape \(3, 8\)"),
        ({"b2": torch.zeros(E, F)}, r"b2 must have shape \(3, 5\)"),
        ({"w2": torch.zeros(E, H)}, "w2 must have 3 dimensions"),
        ({"layout": "fused"}, "layout must be one of .*, got 'fused'"),
    ],
    ids=["w13", "b13", "b2", "w2", "layout"],
)
def test_pack_rejects(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack_weights(**{**make_weights(bias=True), "layout": "split", **changes})


@pytest.mark.parametrize(
    ("layout", "changes", "message"),
    [
        ("split", {"w3": None}, r"must have \['w1', 'w2', 'w3'\].* got \['b1', 'b2', 'b3', 'w1'"),
        ("split", {"b3": None}, r"may have \['b1', 'b3'\] and b2"),
        ("split", {"w3": torch.zeros(E, F + 1, H)}, "gate and up must have the same shape"),
        ("up_gate", {"w1": torch.zeros(E, F, H)}, "layout='up_gate'"),
        ("up_gate", {"w13": torch.zeros(E, 7, H)}, "2F rows, got 7"),
        ("interleaved", {"w2": torch.zeros(E, H, F + 1)}, r"w13 must have shape \(3, 10, 5\)"),
        ("interleaved", {"b13": torch.zeros(2 * F)}, "b13 must have 2 dimensions"),
    ],
    ids=["missing", "half bias", "unequal", "unknown", "odd", "w2", "b13"],
)
def test_unpack_rejects(layout: str, changes: dict[str, Any], message: str) -> None:
    packed = {**pack_weights(**make_weights(bias=True), layout=layout), **changes}
    packed = {name: tensor for name, tensor in packed.items() if tensor is not None}
    with pytest.raises(ValueError, match=message):
        unpack_weights(packed, layout=layout)


def test_pack_needs_both_matrices() -> None:
    with pytest.raises(TypeError, match="pack_weights: w13 must be a tensor, got NoneType"):
        pack_weights(None, torch.ones(2, 4, 3), layout="split")  # type: ignore[arg-type]
