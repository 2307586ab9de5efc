"""Attention over a sequence that is spread over ranks in zigzag order (`cp_split`).

    out = softmax(scale * q @ k.T) @ v, over all ranks' keys, up to the query's place if causal
    lse = log(sum(exp(scale * q @ k.T)))

Methods, all with the same result:

- ring: keys and values go around while each rank attends, from its queries, to those it holds.
  Step s has those of the rank s before. Under a causal mask rank r sees, at step 0, its own up to
  each query's place; with s <= r the first half of theirs, from all queries; with s > r all of
  theirs, from the second half of its queries: the same work at every step on every rank.
- all_gather: keys and values of the whole sequence come at once, forward and backward. Under a
  causal mask each rank sees its own as above; what is before its first chunk, from all queries;
  what is between its two chunks, from the second half: the same work on every rank.
- heads: `all_to_all` turns parts of the sequence with all heads into the whole sequence with a part
  of the heads, and the results back.

Letters: P ranks, B batch, S tokens here, D elements a head, N documents.

    P = 2, 4 tokens (K = 2, E = 3 or any other), all queries and keys [0], causal, values [1, 2, 3,
    4]: rank 0 holds tokens 0 and 3 and gets out [1, 2.5], lse [log 1, log 4]; rank 1 holds tokens 1
    and 2 and gets out [1.5, 2], lse [log 2, log 3]

In a compiled graph each step's `cp_shift` stands before the attention that it runs under. Kernels:
`moe_ops/kernels/flash_attention.py`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from .. import _library, checks, comm, layout
from ..comm import zigzag
from ..kernels import flash_attention
from ..kernels.flash_attention import Documents, Settings

_METHODS = ("ring", "all_gather", "heads")
_ON_CUDA = (torch.bfloat16, torch.float16)


def cp_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    method: Literal["ring", "all_gather", "heads"] = "ring",
    cu_seqlens_N1: torch.Tensor | None = None,
    group: dist.ProcessGroup | str | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out [B, query heads, S, D] in q's dtype, lse [B, query heads, S] float32 (float64 with
    float64 inputs). Collective.

    Args:
        q: [B, query heads, S, D], this rank's part as `cp_split` gives it; S is even. On CUDA
            bfloat16 or float16.
        k, v: [B, heads, S, D]; the query heads are a multiple of these.
        scale: default 1 / sqrt(D).
        method: see above. With "heads" the query heads are a multiple of P, too; heads of keys that
            are not are repeated until they are.
        cu_seqlens_N1: as given to `cp_split`: queries see the keys of their own document alone. The
            CPU takes masks for that, and a graph there may keep them for backward.

    Raises:
        TypeError, ValueError: on every rank, if one of them gave a wrong dtype, device, size or
            method, or if they differ.
        RuntimeError: `cu_seqlens_N1` breaks the rule above; on CUDA an assertion on the device, on
            that rank alone. Values that differ by rank are not noticed.

    Gradients: `cp_attention_backward`, with "heads" those of the exchanges and the attention; none
    through lse. Saved for it: this rank's q, k, v, out and lse, or its heads' (repeated ones, too).
    """
    name = comm.group_name_of(group)
    arguments = (causal, _default_scale(q) if scale is None else scale, name)
    if cu_seqlens_N1 is None:
        return _attend(q, k, v, method, *arguments)
    zigzag.agree_unless_compiling(
        "cp_attention", name, lambda: ("documents", method, *_check(q, k, v, *arguments))
    )
    zigzag.check_documents("cp_attention", cu_seqlens_N1, q, 2, 2, name)
    order = zigzag.chunk_order(cu_seqlens_N1, 2, q.shape[2], name)
    q, k, v = (x.index_select(2, order) for x in (q, k, v))
    ends = zigzag.chunk_ends(cu_seqlens_N1, name)
    out, lse = (
        x.index_select(2, order.argsort()) for x in _attend(q, k, v, method, *arguments, ends)
    )
    return out, lse


def _default_scale(q: torch.Tensor) -> float:
    size = q.shape[-1] if isinstance(q, torch.Tensor) and q.dim() else 0
    return size**-0.5 if size else 1.0  # any, where q is refused: on every rank, later


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    method: str,
    causal: bool,
    scale: float,
    group_name: str,
    ends_N1: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    arguments = (causal, scale, group_name, method == "all_gather", ends_N1)
    if method not in ("ring", "all_gather"):
        return _by_heads(method, q, k, v, *arguments)
    if torch.compiler.is_compiling():  # so that the graph shows the steps
        _check(q, k, v, *arguments)
        return _Traced.apply(q, k, v, *arguments)
    return _cp_attention(q, k, v, *arguments)


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    scale: float,
    group_name: str,
    gather: bool = False,
    ends_N1: torch.Tensor | None = None,
) -> tuple[object, ...]:
    op = "cp_attention"
    checks.tensor(op, "q", q, 4, _ON_CUDA if q.device.type == "cuda" else checks.FLOATS)
    checks.tensor(op, "k", k, 4, (q.dtype,), like=q)
    checks.tensor(op, "v", v, 4, (q.dtype,), like=q)
    for dim in range(4):
        checks.same_size(op, "k and v must have equal shapes", k.shape[dim], v.shape[dim])
        if dim != 1:
            checks.same_size(op, "q and k may differ in heads alone", q.shape[dim], k.shape[dim])
    # NOTE: not checks.holds, whose message the compiler cannot trace.
    if 0 in k.shape:  # PyTorch's kernel for the CPU ends the process if there are no keys
        raise ValueError(f"{op}: k must not be empty, got {tuple(k.shape)}")
    if q.shape[1] % k.shape[1]:
        raise ValueError(
            f"{op}: q's heads must be a multiple of k's {k.shape[1]}, got {q.shape[1]}"
        )
    if not 0 < scale < math.inf:  # PyTorch's masks take the order of scores for granted
        raise ValueError(f"{op}: scale must be positive and finite, got {scale}")
    if q.shape[2] % 2:
        raise ValueError(f"{op}: q must have an even number of tokens, got {q.shape[2]}")
    if ends_N1 is not None:
        checks.tensor(op, "ends_N1", ends_N1, 1, (torch.int64,), like=q)
    has_gradient = any(x.requires_grad for x in (q, k, v))  # to exchange, too
    settings = (causal, scale, gather, ends_N1 is None, has_gradient)
    return tuple(q.shape), k.shape[1], q.dtype, *settings


def _check_heads(
    method: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *settings: Any
) -> tuple[object, ...]:
    op = "cp_attention"
    checks.one_of(op, "method", method, _METHODS)
    checked, num_ranks = _check(q, k, v, *settings), zigzag.group_size(settings[2])
    if q.shape[1] % num_ranks:
        raise ValueError(
            f"{op}: q's heads must be a multiple of the group's {num_ranks} ranks, got {q.shape[1]}"
        )
    return method, *checked


def _check_backward(grad: torch.Tensor, *args: Any) -> tuple[object, ...]:
    op, (q, k, v, out, lse, *settings) = "cp_attention_backward", args
    for name, value, like in (("grad", grad, q), ("out", out, q), ("lse", lse, q[..., 0])):
        checks.tensor(op, name, value, like.dim(), like=like)
        for found, wanted in zip(value.shape, like.shape):
            checks.same_size(op, f"{name} must have the size of q", found, wanted)
    return _check(q, k, v, *settings)


def _pack(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Both in one flat message, of which they are read, too: it is saved in place of them."""
    return torch.stack([k, v]).flatten()


def _unpack(buf: torch.Tensor, like: torch.Tensor) -> tuple[torch.Tensor, ...]:
    # NOTE: not unbind, whose results the partitioner would save beside buf.
    both = buf.view(2, *like.shape)
    return both[0], both[1]


def _up_to(x: torch.Tensor, number: int) -> torch.Tensor:
    """The first `number` tokens."""
    return x[:, :, :number] if number < x.shape[2] else x


def _reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    scale: float,
    group_name: str,
    gather: bool = False,
    ends_N1: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    ring = zigzag.Ring(causal, group_name)
    out, lse = (_gathered if gather else _around)(q, k, v, ring, _settings(q, scale, ends_N1))
    # NOTE: a new tensor. torch 2.11 returns each step's from `_Traced`, too, not differentiable,
    # and where one is the same as `out` (a cast that changes nothing) gradients were 0.
    return out.contiguous().to(q.dtype, copy=True), lse.contiguous()


def _settings(q: torch.Tensor, scale: float, ends_N1: torch.Tensor | None) -> Settings:
    return Settings(scale, None if ends_N1 is None else Documents(ends_N1, q.shape[2] // 2))


def _around(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ring: zigzag.Ring, settings: Settings
) -> tuple[torch.Tensor, ...]:
    buf = started = _pack(k, v)
    sums: tuple[torch.Tensor, ...] = ()
    for step in range(ring.num_steps):
        if not ring.is_last(step):
            started = ring.start(buf, buf)
        first, num_keys, masked = ring.ranges(step, q.shape[2])
        keys, values = (_up_to(x, num_keys) for x in _unpack(buf, k))
        sums = flash_attention.merge(sums, q, keys, values, first, masked, settings)
        if not ring.is_last(step):
            buf = ring.wait(started, buf)
    return sums


def _gathered(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ring: zigzag.Ring, settings: Settings
) -> tuple[torch.Tensor, ...]:
    sums: tuple[torch.Tensor, ...] = ()
    for first, both, masked in ring.pieces(torch.stack([k, v]), None):
        if both.shape[3]:
            sums = flash_attention.merge(sums, q, both[0], both[1], first, masked, settings)
    return sums


def _backward_reference(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    scale: float,
    group_name: str,
    gather: bool = False,
    ends_N1: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    run = _gathered_backward if gather else _around_backward
    ring, settings = zigzag.Ring(causal, group_name), _settings(q, scale, ends_N1)
    grad_q, grad_kv = run((grad, q, out, lse), k, v, ring, settings)
    grad_k, grad_v = _unpack(grad_kv.to(q.dtype), k)
    return grad_q.to(q.dtype).contiguous(), grad_k.clone(), grad_v.clone()


def _around_backward(
    of_q: Sequence[torch.Tensor],
    k: torch.Tensor,
    v: torch.Tensor,
    ring: zigzag.Ring,
    settings: Settings,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of keys and values goes around with them, and at last home."""
    grad, num_tokens = of_q[0], k.shape[2]
    buf = started = _pack(k, v)
    grad_q = own = travelling = returning = grad
    for step in range(ring.num_steps):
        if not ring.is_last(step):
            started = ring.start(buf, grad)
        first, num_keys, masked = ring.ranges(step, num_tokens)
        keys, values = (_up_to(x, num_keys) for x in _unpack(buf, k))
        block_q, grad_kv = flash_attention.block_backward(
            of_q, keys, values, first, masked, settings
        )
        grad_q = block_q if step == 0 else grad_q + block_q
        grad_kv = pad(grad_kv, (0, 0, 0, num_tokens - num_keys)).flatten()
        if step == 0:
            own = grad_kv
        else:
            if step > 1:
                grad_kv = grad_kv + ring.wait(returning, travelling)
            travelling, returning = grad_kv, ring.start(grad_kv, grad)
        if not ring.is_last(step):
            buf = ring.wait(started, buf)
    if ring.num_steps > 1:
        own = own + ring.wait(returning, travelling)
    return grad_q, own


def _gathered_backward(
    of_q: Sequence[torch.Tensor],
    k: torch.Tensor,
    v: torch.Tensor,
    ring: zigzag.Ring,
    settings: Settings,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each rank's gradient of all keys and values, summed where they are from."""
    grads_q, grads_kv = [], []
    for first, both, masked in ring.pieces(torch.stack([k, v]), of_q[0]):
        grad_kv = both.to(layout.accumulate_dtype(k.dtype))
        if both.shape[3]:
            grad_q, grad_kv = flash_attention.block_backward(
                of_q, both[0], both[1], first, masked, settings
            )
            grads_q.append(grad_q)
        grads_kv.append(grad_kv)
    if ring.causal:
        own, before, between = grads_kv
        first_own, last_own = own.chunk(2, 3)
        after = torch.zeros_like(before)  # as long, and not seen
        grads_kv = [before, first_own, between, last_own, after]
    total = torch.cat(grads_kv, 3)
    own = torch.ops.moe_ops.cp_unsplit_backward.default(total, 3, ring.group_name)
    return functools.reduce(torch.add, grads_q), own


def _by_heads(
    method: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *arguments: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    check = functools.partial(_check_heads, method, q, k, v, *arguments)
    causal, scale, group_name, _, ends_N1 = arguments
    zigzag.agree_unless_compiling("cp_attention", group_name, check)
    settings, num_ranks = _settings(q, scale, ends_N1), zigzag.group_size(group_name)
    if (repeats := num_ranks // math.gcd(k.shape[1], num_ranks)) > 1:
        k, v = (x.repeat_interleave(repeats, 1) for x in (k, v))
    q, k, v = (zigzag.to_heads(x, group_name) for x in (q, k, v))
    out, lse = flash_attention.attend(q, k, v, causal, settings)
    lse = zigzag.from_heads(lse.unsqueeze(-1), group_name).squeeze(-1)
    return zigzag.from_heads(out, group_name), lse


def _fake(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *settings: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = layout.accumulate_dtype(q.dtype)
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=dtype)


def _backward_fake(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), k.new_empty(k.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    q, k, v, *settings = inputs
    ctx.settings = settings[:4]
    ctx.save_for_backward(q, k, v, *output, *settings[4:])
    ctx.mark_non_differentiable(output[1])


def _gradients(run: Any, ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Of the operator's arguments, by `run`: the backward operator, or what it does."""
    q, k, v, out, lse, *ends_N1 = ctx.saved_tensors
    others = (*ctx.settings, *ends_N1)
    return *run(grad, q, k, v, out, lse, *others), *[None for _ in others]


def _backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return _gradients(_cp_attention_backward, ctx, grad)


class _Traced(torch.autograd.Function):
    """The operator for a compiler to look into."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        output = _reference(*args)
        _setup_context(ctx, args, output)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _gradients(_backward_reference, ctx, grads[0])


_cp_attention = _library.define(
    "cp_attention(Tensor q, Tensor k, Tensor v, bool causal, float scale, str group_name,"
    " bool gather=False, Tensor? ends_N1=None) -> (Tensor out, Tensor lse)",
    check=_check,
    reference=_reference,
    fake=_fake,
    setup_context=_setup_context,
    backward=_backward,
)
_cp_attention_backward = _library.define(
    "cp_attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse,"
    " bool causal, float scale, str group_name, bool gather=False, Tensor? ends_N1=None)"
    " -> (Tensor grad_q, Tensor grad_k, Tensor grad_v)",
    check=_check_backward,
    reference=_backward_reference,
    fake=_backward_fake,
)
