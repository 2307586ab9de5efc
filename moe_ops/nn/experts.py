"""The experts of one rank as two grouped matmuls, and the shared expert that every token passes.

Letters: E experts, L experts here, C rows, H hidden, F ffn (of an expert's part here).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from .. import checks, comm, layout
from ..ops.grouped_bias import grouped_bias
from ..ops.grouped_mm import grouped_mm
from ..ops.swiglu import swiglu
from .config import ACTIVATIONS
from .expert_groups import ExpertGroups

# Options of `swiglu` for each gated activation of MoEConfig; "relu2" has no gate.
_GATED: dict[str, dict[str, Any]] = {
    "swiglu": {},
    "geglu": {"act": "gelu"},
    "swiglu_clamped": {"limit": 7.0, "alpha": 1.702, "up_offset": 1.0},
}


class Experts(nn.Module):
    """w13 [L, 2F, H] (gate first), w2 [L, H, F], optional b13 [L, 2F] and b2 [L, H]; F for 2F with
    "relu2".

    On a mesh they are DTensors, w13 [E, 2, F, H] and b13 [E, 2, F] (1 for 2 with "relu2"), so that
    an axis "etp" can spread F; b2 is the same on its ranks.

    With equal seeds on all ranks an expert starts with the same weights under every layout.

    Args:
        group: a ProcessGroup, its name, a DeviceMesh with an axis "ep" and perhaps "etp", or None.

    Raises:
        ValueError: the experts do not spread evenly over `group`, or F over "etp", or the
            activation is unknown.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_experts: int,
        *,
        activation: str = "swiglu",
        bias: bool = False,
        group: Any = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size, self.ffn_hidden_size = hidden_size, ffn_hidden_size
        self.num_experts = num_experts
        self.activation = activation
        self._ways = 2 if activation in _GATED else 1  # matmuls into F
        self.groups = ExpertGroups.of(group)
        num_ranks, num_parts = comm.group_size(self.groups.ep), self.groups.num_parts
        checks.one_of("Experts", "activation", activation, ACTIVATIONS)
        checks.experts("Experts", num_experts, num_ranks)
        if ffn_hidden_size % num_parts:
            raise ValueError(
                f"Experts: ffn_hidden_size must be a multiple of the {num_parts} ranks of 'etp', "
                f"got {ffn_hidden_size}"
            )
        ffn_here = ffn_hidden_size // num_parts
        up = (self._ways * ffn_here,) if self.groups.mesh is None else (self._ways, ffn_here)
        num_experts_here = num_experts // num_ranks

        def parameter(*shape: int, spread: int | None) -> nn.Parameter:
            local = torch.empty(num_experts_here, *shape, device=device, dtype=dtype)
            return self.groups.parameter(local, spread)

        self.w13 = parameter(*up, hidden_size, spread=2)
        self.w2 = parameter(hidden_size, ffn_here, spread=2)
        self.b13 = parameter(*up, spread=2) if bias else None
        self.b2 = parameter(hidden_size, spread=None) if bias else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """uniform(-1 / sqrt(fan_in), 1 / sqrt(fan_in)) as nn.Linear, from a stream of random
        numbers per expert.
        """
        seed = int(torch.randint(2**62, (), device="cpu"))
        if self.w13.is_meta:
            return
        groups, hidden_size, ffn = self.groups, self.hidden_size, self.ffn_hidden_size
        num_experts_here = self.num_experts // comm.group_size(groups.ep)
        first = comm.group_rank(groups.ep) * num_experts_here
        # An expert's tensors one after the other: whole, where F lies in it, fan-in.
        tensors = (
            (self.w13, (self._ways, ffn, hidden_size), 1, hidden_size),
            (self.b13, (self._ways, ffn), 1, hidden_size),
            (self.w2, (hidden_size, ffn), 1, ffn),
            (self.b2, (hidden_size,), None, ffn),
        )
        for expert in range(num_experts_here):
            stream = torch.Generator(self.w13.device).manual_seed((seed + first + expert) % 2**63)
            for parameter, shape, dim, fan_in in tensors:
                if parameter is not None:
                    bound = 1 / math.sqrt(fan_in)
                    whole = torch.empty(shape, dtype=parameter.dtype, device=parameter.device)
                    whole.uniform_(-bound, bound, generator=stream)
                    groups.fill(parameter, expert, groups.part_of(whole, dim))

    def _local(self) -> tuple[Any, Any, Any, Any]:
        """This rank's w13, w2, b13, b2 in the shapes of a group without a mesh."""
        parameters: tuple[Any, ...] = (self.w13, self.w2, self.b13, self.b2)
        w13, w2, b13, b2 = (p.to_local() if isinstance(p, DTensor) else p for p in parameters)
        if self.groups.mesh is not None:
            w13, b13 = w13.flatten(1, 2), None if b13 is None else b13.flatten(1, 2)
        return w13, w2, b13, b2

    def forward(
        self,
        rows_CH: torch.Tensor,
        row_weights_C: torch.Tensor | None,
        offsets_L: torch.Tensor,
    ) -> torch.Tensor:
        """[C, H]: each row through the expert that owns it, times its weight; zero past the last
        offset. With "etp" this rank's term of the sum over its ranks, which hold the same rows.

        Args:
            rows_CH: [C, H] in the parameters' dtype (any under autocast).
            row_weights_C: [C] float32, applied at the activation and to the down bias, or None.
            offsets_L: [L] int32, inclusive ends of the experts' rows.
        """
        w13, w2, b13, b2 = self._local()
        h = grouped_mm(rows_CH, w13, offsets_L)
        if b13 is not None:
            h = grouped_bias(h, b13, None, offsets_L)
        if self.activation in _GATED:
            a_CF = swiglu(h, row_weights_C, offsets_L, **_GATED[self.activation])
        else:
            a_CF = _squared_relu(h, row_weights_C)
        z_CH = grouped_mm(a_CF, w2, offsets_L)
        if b2 is not None:
            num_parts = self.groups.num_parts
            if num_parts > 1:  # a share of the value, but all of the gradient: copies stay equal
                b2 = torch.add(b2, b2.detach(), alpha=1 / num_parts - 1)
            z_CH = grouped_bias(z_CH, b2, row_weights_C, offsets_L)
        return z_CH

    def extra_repr(self) -> str:
        shapes = {name: tuple(value.shape) for name, value in self.named_parameters(recurse=False)}
        return f"{self.activation}, {shapes}"


def _squared_relu(h: torch.Tensor, row_weights: torch.Tensor | None) -> torch.Tensor:
    """relu(h)^2 * weight, computed in float32 as `swiglu` is."""
    squares = functional.relu(h.to(layout.accumulate_dtype(h.dtype))).square()
    if row_weights is not None:
        squares = squares * row_weights[:, None]
    return squares.to(h.dtype)


def _activate(h: torch.Tensor, activation: str) -> torch.Tensor:
    """[..., 2F] -> [..., F] ([..., F] for "relu2") in plain PyTorch, as `swiglu` computes it."""
    if activation == "relu2":
        return functional.relu(h).square()
    gate, up = h.chunk(2, dim=-1)
    if activation == "swiglu":
        return functional.silu(gate) * up
    if activation == "geglu":
        return functional.gelu(gate) * up
    limit, alpha, up_offset = _GATED[activation].values()
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + up_offset)


class SharedExperts(nn.Module):
    """A dense expert of width F_shared that every token passes; `gate` multiplies by sigmoid(x @
    gate.weight.T).

    Plain PyTorch: the compiler fuses it and a pass may run it beside an exchange. No biases, so a
    zero row stays zero.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        *,
        activation: str = "swiglu",
        gate: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        checks.one_of("SharedExperts", "activation", activation, ACTIVATIONS)
        self.activation = activation
        up_size = ffn_hidden_size * (2 if activation in _GATED else 1)

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False, device=device, dtype=dtype)

        self.up = linear(hidden_size, up_size)
        self.down = linear(ffn_hidden_size, hidden_size)
        self.gate = linear(hidden_size, 1) if gate else None

    def reset_parameters(self) -> None:
        """As nn.Linear."""
        for linear in (self.up, self.down, self.gate):
            if linear is not None:
                linear.reset_parameters()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., H] -> [..., H]."""
        out = self.down(_activate(self.up(x), self.activation))
        return out if self.gate is None else out * torch.sigmoid(self.gate(x))
