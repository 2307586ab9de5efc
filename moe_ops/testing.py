"""For tests and benchmarks: a float64 oracle of a MoE layer, comparisons, inputs, NaN in memory.

Letters: T tokens, K top-k, E experts, P ranks, H hidden, F ffn; -1 = none.
"""

from __future__ import annotations

import dataclasses

import torch

# Error allowed relative to the largest expected magnitude, where no reference allows more.
TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 1.6e-2,
}
ACTIVATIONS = ("swiglu", "geglu", "relu2", "swiglu_clamped")
SKEWS = ("uniform", "one expert", "zipf", "rank0 only")
DTYPE_NAMES = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
}


def fill_empty_with_nan() -> None:
    """From now on in this process `torch.empty` and its like hold NaN, or the largest integer."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]


def activate(h_F: torch.Tensor, activation: str) -> torch.Tensor:
    """One row between the two matmuls of an expert, [2F] -> [F], or [F] -> [F] for relu2."""
    if activation == "relu2":
        return h_F.relu().square()
    gate, up = h_F.chunk(2)
    if activation == "swiglu":
        return torch.nn.functional.silu(gate) * up
    if activation == "geglu":
        return torch.nn.functional.gelu(gate) * up
    if activation == "swiglu_clamped":
        gate, up = gate.clamp(max=7), up.clamp(-7, 7)
        return gate * torch.sigmoid(1.702 * gate) * (up + 1)
    raise ValueError(f"activate: activation must be one of {ACTIVATIONS}, got {activation!r}")


def moe_oracle(
    x_TH: torch.Tensor,
    ids_TK: torch.Tensor,
    weights_TK: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    bias13: torch.Tensor | None = None,
    bias2: torch.Tensor | None = None,
    activation: str = "swiglu",
) -> torch.Tensor:
    """[T, H] float64: for each token the weighted sum of its experts' outputs, choice by choice.

    Differentiable in every float argument, in float64; a gradient is zero, never None, where
    nothing was routed.

    Args:
        ids_TK: [T, K] integers, -1 = none; a repeated id counts twice.
        w13: [E, 2F, H], gate first ([E, F, H] for relu2); w2: [E, H, F].
        bias13: [E, 2F or F]; bias2: [E, H].
        activation: one of `ACTIVATIONS`.
    """
    x, weights, w13, w2 = (t.double() for t in (x_TH, weights_TK, w13, w2))
    bias13, bias2 = (None if t is None else t.double() for t in (bias13, bias2))
    nothing_H = x.new_zeros(x.shape[1])
    for part in (x, weights, w13, w2, bias13, bias2):
        nothing_H = nothing_H if part is None else nothing_H + 0 * part.sum()
    outputs = []
    for token, experts in enumerate(ids_TK.tolist()):
        y_H = nothing_H
        for k, expert in enumerate(experts):
            if expert < 0:
                continue
            h = w13[expert] @ x[token]
            h = h if bias13 is None else h + bias13[expert]
            z_H = w2[expert] @ activate(h, activation)
            z_H = z_H if bias2 is None else z_H + bias2[expert]
            y_H = y_H + weights[token, k] * z_H
        outputs.append(y_H)
    return torch.stack(outputs) if outputs else nothing_H.expand(0, -1)


def assert_equal(name: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Same shape, dtype and values, bit for bit but for the payload of NaN."""
    _same_shape(name, actual, expected)
    assert actual.dtype == expected.dtype, f"{name}: dtype {actual.dtype}, not {expected.dtype}"
    actual, expected = actual.detach(), expected.detach().to(actual.device)
    wrong = actual != expected
    if actual.is_floating_point():
        wrong &= ~(actual.isnan() & expected.isnan())
    _fail_at_first(name, wrong, actual, expected, "must be equal")


def assert_close(
    name: str,
    actual: torch.Tensor,
    expected_f64: torch.Tensor,
    same_dtype_reference: torch.Tensor | None = None,
    scale: float | None = None,
) -> None:
    """The error against the float64 reference is at most twice that of one in the same dtype.

    Without such a reference, or where it is exact, at most `TOLERANCE` of the actual's dtype times
    `scale`, by default the largest expected magnitude. Values that are not finite must agree.
    """
    _same_shape(name, actual, expected_f64)
    assert actual.is_floating_point(), f"{name}: dtype {actual.dtype} is not floating"
    found, expected = actual.detach().double(), expected_f64.detach().double().to(actual.device)
    finite = expected.isfinite()
    largest = expected[finite].abs().max().item() if finite.any() else 0.0
    allowed = TOLERANCE[actual.dtype] * (largest if scale is None else scale)
    if same_dtype_reference is not None:
        _same_shape(name, same_dtype_reference, expected)
        reference = same_dtype_reference.detach().double().to(actual.device)
        errors = (reference - expected).abs()[finite & reference.isfinite()]
        allowed = max(allowed, 2 * errors.max().item() if errors.numel() else 0.0)
    error = (found - expected).abs()
    agree = (found == expected) | (found.isnan() & expected.isnan())
    wrong = torch.where(finite, ~(error <= allowed), ~agree)
    _fail_at_first(name, wrong, actual, expected, f"may differ by {allowed:.3g}")


def _same_shape(name: str, actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.shape == expected.shape, (
        f"{name}: shape {tuple(actual.shape)}, not {tuple(expected.shape)}"
    )


def _fail_at_first(
    name: str, wrong: torch.Tensor, actual: torch.Tensor, expected: torch.Tensor, rule: str
) -> None:
    if not wrong.any():
        return
    first = tuple(wrong.nonzero()[0].tolist())
    raise AssertionError(
        f"{name}{list(first)}: got {actual[first].item()!r}, expected {expected[first].item()!r}, "
        f"{rule}; {int(wrong.sum())} of {wrong.numel()} values are wrong"
    )


def make_ids(
    num_tokens: int,
    top_k: int,
    num_experts: int,
    skew: str = "uniform",
    none_fraction: float = 0.0,
    generator: torch.Generator | None = None,
    num_ranks: int = 1,
    dtype: torch.dtype = torch.int32,
) -> torch.Tensor:
    """[T, K] experts, distinct within a token, -1 if none is left or by chance `none_fraction`.

    Args:
        skew: "uniform"; "one expert" (each token goes to the last expert alone); "zipf" (expert e
            is as popular as 1 / (e + 1)); "rank0 only" (rank 0's E / num_ranks experts).
    """
    popularity_E = torch.zeros(num_experts, dtype=torch.float64)
    if skew == "zipf":
        popularity_E = -torch.arange(1, num_experts + 1, dtype=torch.float64).log()
    elif skew == "one expert":
        popularity_E[:-1] = -torch.inf
    elif skew == "rank0 only":
        popularity_E[num_experts // num_ranks :] = -torch.inf
    elif skew != "uniform":
        raise ValueError(f"make_ids: skew must be one of {SKEWS}, got {skew!r}")
    noise_TE = torch.rand(num_tokens, num_experts, generator=generator, dtype=torch.float64)
    keys_TE = popularity_E - (-noise_TE.clamp(1e-12, 1 - 1e-12).log()).log()
    keys_TK, ids_TK = keys_TE.topk(top_k, dim=1)
    dropped_TK = torch.rand(num_tokens, top_k, generator=generator) < none_fraction
    return torch.where(dropped_TK | keys_TK.isneginf(), -1, ids_TK).to(dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inputs:
    """Tensors of a `Case`: what a rank holds and the experts of all ranks."""

    x_TH: torch.Tensor
    ids_TK: torch.Tensor
    weights_TK: torch.Tensor
    w13: torch.Tensor
    w2: torch.Tensor
    bias13: torch.Tensor
    bias2: torch.Tensor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Sizes, dtype and routing of one test; its `str` is its id, e.g. T7-K2-E4-H64-bf16."""

    num_tokens: int = 7
    top_k: int = 2
    num_experts: int = 4
    hidden_size: int = 8
    ffn_size: int = 6
    dtype: torch.dtype = torch.float32
    skew: str = "uniform"
    none_fraction: float = 0.0
    activation: str = "swiglu"

    def __str__(self) -> str:
        sizes = f"T{self.num_tokens}-K{self.top_k}-E{self.num_experts}-H{self.hidden_size}"
        extras = [DTYPE_NAMES[self.dtype]]
        if self.skew != "uniform":
            extras.append(self.skew.replace(" ", "_"))
        if self.none_fraction:
            extras.append(f"none{self.none_fraction}")
        if self.activation != "swiglu":
            extras.append(self.activation)
        return "-".join([sizes, *extras])

    def make(self, seed: int = 0, num_ranks: int = 1, device: str = "cpu") -> Inputs:
        """Inputs of the rank with this seed; experts do not depend on it."""
        own, shared = torch.Generator().manual_seed(1000 + seed), torch.Generator().manual_seed(7)
        up_size = self.ffn_size * (1 if self.activation == "relu2" else 2)
        gate_dtype = torch.promote_types(self.dtype, torch.float32)

        def normal(generator: torch.Generator, *shape: int) -> torch.Tensor:
            values = torch.randn(shape, generator=generator, dtype=torch.float64)
            return values.to(device, self.dtype)

        def drawn(*shape: int) -> torch.Tensor:
            fan_in = shape[-1] if len(shape) == 3 else 1
            return normal(shared, *shape) * fan_in**-0.5

        tokens, top_k, experts = self.num_tokens, self.top_k, self.num_experts
        ids_TK = make_ids(tokens, top_k, experts, self.skew, self.none_fraction, own, num_ranks)
        weights_TK = torch.rand(tokens, top_k, generator=own, dtype=torch.float64) + 0.1
        return Inputs(
            x_TH=normal(own, tokens, self.hidden_size),
            ids_TK=ids_TK.to(device),
            weights_TK=weights_TK.to(device, gate_dtype),
            w13=drawn(experts, up_size, self.hidden_size),
            w2=drawn(experts, self.hidden_size, self.ffn_size),
            bias13=drawn(experts, up_size),
            bias2=drawn(experts, self.hidden_size),
        )


def make_case(num_tokens: int = 7, top_k: int = 2, num_experts: int = 4, **others: object) -> Case:
    """A `Case` from its sizes; `others` are its further fields by name."""
    return Case(num_tokens=num_tokens, top_k=top_k, num_experts=num_experts, **others)  # type: ignore[arg-type]
