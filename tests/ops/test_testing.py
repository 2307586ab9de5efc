"""The oracle, the comparisons and the input makers that all other tests lean on."""

from __future__ import annotations

import pytest
import torch

from moe_ops.testing import (
    ACTIVATIONS,
    SKEWS,
    Case,
    assert_close,
    assert_equal,
    make_case,
    make_ids,
    moe_oracle,
)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_oracle_equals_dense_experts(activation: str) -> None:
    """Every token to every expert: the same as batched matmuls."""
    case = make_case(5, 3, 3, activation=activation, dtype=torch.float64)
    i = case.make()
    ids_TK = torch.arange(3).expand(5, 3)
    h = torch.einsum("th,efh->etf", i.x_TH, i.w13) + i.bias13[:, None]
    gate, up = (h, h) if activation == "relu2" else h.chunk(2, dim=-1)
    a = {
        "swiglu": torch.nn.functional.silu(gate) * up,
        "geglu": torch.nn.functional.gelu(gate) * up,
        "relu2": h.relu() ** 2,
        "swiglu_clamped": gate.clamp(max=7)
        * torch.sigmoid(1.702 * gate.clamp(max=7))
        * (up.clamp(-7, 7) + 1),
    }[activation]
    z = torch.einsum("etf,ehf->eth", a, i.w2) + i.bias2[:, None]
    expected = torch.einsum("eth,te->th", z, i.weights_TK)
    found = moe_oracle(i.x_TH, ids_TK, i.weights_TK, i.w13, i.w2, i.bias13, i.bias2, activation)
    assert_close("output", found, expected)


@pytest.mark.parametrize("num_tokens", [0, 3])
def test_oracle_gradients_are_never_none(num_tokens: int) -> None:
    i = make_case(num_tokens, none_fraction=1.0).make()
    leaves = [t.requires_grad_() for t in (i.x_TH, i.weights_TK, i.w13, i.w2)]
    moe_oracle(leaves[0], i.ids_TK, *leaves[1:]).sum().backward()
    for leaf in leaves:
        assert_equal("gradient", leaf.grad, torch.zeros_like(leaf))


def test_assert_close_names_tensor_coordinate_and_values() -> None:
    expected = torch.tensor([[1, 2], [3, 5]]).double()
    with pytest.raises(AssertionError, match=r"y\[1, 0\]: got 3.5, expected 3.0, may differ by"):
        assert_close("y", torch.tensor([[1, 2], [3.5, 4]]), expected)
    with pytest.raises(AssertionError, match=r"y\[0\]: got nan, expected 1.0"):
        assert_close("y", torch.tensor([torch.nan]), torch.ones(1).double())
    with pytest.raises(AssertionError, match=r"y: shape \(1,\), not \(2,\)"):
        assert_close("y", torch.ones(1), torch.ones(2).double())


def test_assert_close_allows_twice_the_error_of_the_same_dtype() -> None:
    expected, reference = torch.ones(2).double(), torch.tensor([1.0, 1.1])
    assert_close("y", torch.tensor([1.19, 1]), expected, reference)
    with pytest.raises(AssertionError, match=r"y\[0\]"):
        assert_close("y", torch.tensor([1.21, 1]), expected, reference)


def test_assert_equal_sees_one_bit() -> None:
    assert_equal("y", torch.tensor([torch.nan, 1]), torch.tensor([torch.nan, 1]))
    next_after_one = torch.nextafter(torch.ones(()), torch.tensor(2.0))
    with pytest.raises(AssertionError, match="y"):
        assert_equal("y", next_after_one, torch.ones(()))


@pytest.mark.parametrize("skew", SKEWS)
def test_make_ids_are_distinct_and_skewed(skew: str) -> None:
    ids_TK = make_ids(200, 2, 8, skew, num_ranks=2)
    assert ids_TK.dtype == torch.int32
    counts = torch.bincount(ids_TK[ids_TK >= 0], minlength=8).tolist()
    for ids in ids_TK.tolist():
        held = [expert for expert in ids if expert >= 0]
        assert len(set(held)) == len(held)
    if skew == "one expert":
        assert counts == [0] * 7 + [200]
    elif skew == "rank0 only":
        assert sum(counts[4:]) == 0
    elif skew == "zipf":
        assert counts[0] > 3 * counts[7]
    else:
        assert min(counts) > 25


def test_case_has_an_id_and_repeats() -> None:
    case = Case(num_tokens=7, hidden_size=64, dtype=torch.bfloat16)
    assert str(case) == "T7-K2-E4-H64-bf16"
    first, second, other = case.make(0), case.make(0), case.make(1)
    assert_equal("x_TH", second.x_TH, first.x_TH)
    assert not torch.equal(other.x_TH, first.x_TH)
    assert_equal("w13", other.w13, first.w13)
