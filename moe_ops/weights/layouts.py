"""Layouts of gated experts' weights. E experts, H hidden, F ffn; ours is "gate_up".

| layout | weights | read by |
|---|---|---|
| `gate_up` | w13 [E, 2F, H], gate first; w2 [E, H, F] | moe_ops, vLLM, SGLang, transformers 5 |
| `up_gate` | w13 [E, 2F, H], up first; w2 [E, H, F] | TensorRT-LLM |
| `split` | w1 (gate), w3 (up) [E, F, H]; w2 [E, H, F] | torchtitan, ONNX Runtime MoE |
| `split_transposed` | w1, w3 [E, H, F]; w2 [E, F, H] | TensorRT IMoELayer |
| `interleaved` | w13 [E, 2F, H], rows g0 u0 g1 u1 ...; w2 [E, H, F] | ONNX Runtime QMoE |
| `interleaved_transposed` | w13 [E, H, 2F], columns alike; w2 [E, F, H] | gpt-oss in transformers |

A matrix is [out, in] as nn.Linear's, "transposed" [in, out]. Biases: b13 [E, 2F] in w13's order, or
b1 and b3 [E, F]; b2 [E, H].

    gates [[1], [2]], ups [[3], [4]], E = 1, F = 2, H = 1
    -> gate_up [[1], [2], [3], [4]], up_gate [[3], [4], [1], [2]],
    interleaved [[1], [3], [2], [4]], interleaved_transposed [[1, 3, 2, 4]]
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from .. import checks

LAYOUTS = (
    "gate_up",
    "up_gate",
    "split",
    "split_transposed",
    "interleaved",
    "interleaved_transposed",
)


def pack_weights(
    w13: torch.Tensor,
    w2: torch.Tensor,
    *,
    layout: str,
    b13: torch.Tensor | None = None,
    b2: torch.Tensor | None = None,
) -> dict[str, torch.Tensor]:
    """Weights of `Experts` in another library's layout, by name: see the module's table.

    Contiguous; a tensor that is so in `layout` already is returned as it is, not copied.

    Args:
        w13: [E, 2F, H], gate first, any dtype.
        w2: [E, H, F].
        layout: one of `LAYOUTS`.
        b13, b2: [E, 2F] and [E, H], or None.

    Raises:
        TypeError, ValueError: not tensors, shapes that do not fit together, unknown layout.
    """
    op = "pack_weights"
    checks.one_of(op, "layout", layout, LAYOUTS)
    for name, given in (("w13", w13), ("w2", w2)):
        if not isinstance(given, torch.Tensor):
            raise TypeError(f"{op}: {name} must be a tensor, got {type(given).__name__}")
    _check_shapes(op, w13, w2, b13, b2)
    packed = {"w2": w2}
    if b2 is not None:
        packed["b2"] = b2
    for kind, tensor in (("w", w13), ("b", b13)):
        if tensor is None:
            continue
        gate, up = tensor.chunk(2, 1)
        if layout.startswith("split"):
            packed |= {f"{kind}1": gate, f"{kind}3": up}
        elif layout == "up_gate":
            packed[f"{kind}13"] = torch.cat([up, gate], 1)
        elif layout.startswith("interleaved"):
            packed[f"{kind}13"] = torch.stack([gate, up], 2).flatten(1, 2)
        else:
            packed[f"{kind}13"] = tensor
    return _transposed(packed, layout)


def unpack_weights(packed: Mapping[str, torch.Tensor], *, layout: str) -> dict[str, torch.Tensor]:
    """`pack_weights` back: w13, w2 and, if given, b13 and b2, bit for bit; contiguous.

    `pack_weights(**unpack_weights(packed, layout=a), layout=b)` goes from one layout to another.

    Args:
        packed: by the names of `layout`, biases or none.
        layout: one of `LAYOUTS`.

    Raises:
        TypeError, ValueError: not tensors, wrong names, shapes that do not fit together, unknown
            layout.
    """
    op = "unpack_weights"
    checks.one_of(op, "layout", layout, LAYOUTS)
    ups = ("1", "3") if layout.startswith("split") else ("13",)
    needed = {"w2", *(f"w{up}" for up in ups)}
    biases = {f"b{up}" for up in ups}
    allowed = needed <= packed.keys() <= needed | biases | {"b2"}
    if not allowed or packed.keys() & biases not in (set(), biases):
        raise ValueError(
            f"{op}: packed must have {sorted(needed)} and may have {sorted(biases)} and b2 with "
            f"layout={layout!r}, got {sorted(packed)}"
        )
    for name, tensor in packed.items():
        checks.tensor(op, name, tensor, 3 if name.startswith("w") else 2)
    straight = _transposed(packed, layout)
    unpacked: dict[str, torch.Tensor] = {
        name: straight[name] for name in ("w2", "b2") if name in straight
    }
    for kind in "wb":
        if f"{kind}{ups[0]}" in straight:
            parts = [straight[f"{kind}{up}"] for up in ups]
            unpacked[f"{kind}13"] = _gate_first(op, parts, layout).contiguous()
    _check_shapes(op, **unpacked)
    return unpacked


def _gate_first(op: str, parts: list[torch.Tensor], layout: str) -> torch.Tensor:
    """[E, 2F, ...] of one or two tensors [E, rows, ...]."""
    if len(parts) == 2:
        if parts[0].shape != parts[1].shape:
            shapes = [tuple(part.shape) for part in parts]
            raise ValueError(f"{op}: gate and up must have the same shape, got {shapes}")
        return torch.cat(parts, 1)
    (both,) = parts
    if both.shape[1] % 2:
        raise ValueError(f"{op}: gate and up must have 2F rows, got {both.shape[1]}")
    if layout == "up_gate":
        return torch.cat(both.chunk(2, 1)[::-1], 1)
    if layout.startswith("interleaved"):
        return both.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)
    return both


def _transposed(tensors: Mapping[str, torch.Tensor], layout: str) -> dict[str, torch.Tensor]:
    """The matrices transposed, if in `layout` they are; all contiguous."""
    turn = layout.endswith("transposed")
    return {
        name: (tensor.mT if turn and name.startswith("w") else tensor).contiguous()
        for name, tensor in tensors.items()
    }


def _check_shapes(
    op: str,
    w13: torch.Tensor,
    w2: torch.Tensor,
    b13: torch.Tensor | None = None,
    b2: torch.Tensor | None = None,
) -> None:
    checks.tensor(op, "w2", w2, 3)
    num_experts, hidden, ffn = w2.shape
    expected = (
        ("w13", w13, (num_experts, 2 * ffn, hidden)),
        ("b13", b13, (num_experts, 2 * ffn)),
        ("b2", b2, (num_experts, hidden)),
    )
    for name, tensor, shape in expected:
        if tensor is None:
            continue
        checks.tensor(op, name, tensor, len(shape))
        if tensor.shape != shape:
            raise ValueError(
                f"{op}: {name} must have shape {shape} with w2 {tuple(w2.shape)}, "
                f"got {tuple(tensor.shape)}"
            )
