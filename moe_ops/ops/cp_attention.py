"""Attention over a sequence that is spread over ranks in zigzag order (`cp_split`): keys and values
go around the ring while each rank attends, from its queries, to those it holds.

    out = softmax(scale * q @ k.T) @ v, over all ranks' keys, up to the query's place if causal
    lse = log(sum(exp(scale * q @ k.T)))

Step s has the keys of the rank s before. Under a causal mask rank r sees, at step 0, its own up to
each query's place; with s <= r the first half of theirs, from all queries; with s > r all of
theirs, from the second half of its queries: the same work at every step on every rank.

Letters: P ranks, B batch, S tokens here, D elements a head.

    P = 2, 4 tokens (K = 2, E = 3 or any other), all queries and keys [0], causal, values [1, 2, 3,
    4]: rank 0 holds tokens 0 and 3 and gets out [1, 2.5], lse [log 1, log 4]; rank 1 holds tokens 1
    and 2 and gets out [1.5, 2], lse [log 2, log 3]

In a compiled graph each step's `cp_shift` stands before the attention that it runs under. Kernels:
PyTorch's flash attention, on the CPU its counterpart there.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from .. import _library, checks, comm, layout

_ON_CUDA = (torch.bfloat16, torch.float16)


def cp_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    group: dist.ProcessGroup | str | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out [B, query heads, S, D] in q's dtype, lse [B, query heads, S] float32 (float64 with
    float64 inputs). Collective.

    Args:
        q: [B, query heads, S, D], this rank's part as `cp_split` gives it; S is even. On CUDA
            bfloat16 or float16.
        k, v: [B, heads, S, D]; the query heads are a multiple of these.
        scale: default 1 / sqrt(D).

    Raises:
        TypeError, ValueError: on every rank, if one of them gave a wrong dtype, device or size, or
            if they differ.

    Gradients: `cp_attention_backward`; none through lse. Saved for it: this rank's q, k, v, out and
    lse.
    """
    name = comm.group_name_of(group)
    arguments = (causal, q.shape[-1] ** -0.5 if scale is None else scale, name)
    if torch.compiler.is_compiling():  # so that the graph shows the steps
        _check(q, k, v, *arguments)
        return _Traced.apply(q, k, v, *arguments)
    return _cp_attention(q, k, v, *arguments)


def _check(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float, group_name: str
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
    if q.shape[2] % 2:
        raise ValueError(f"{op}: q must have an even number of tokens, got {q.shape[2]}")
    return tuple(q.shape), k.shape[1], q.dtype, causal, scale


def _check_backward(grad: torch.Tensor, *args: Any) -> tuple[object, ...]:
    op, (q, k, v, out, lse, *settings) = "cp_attention_backward", args
    for name, value, like in (("grad", grad, q), ("out", out, q), ("lse", lse, q[..., 0])):
        checks.tensor(op, name, value, like.dim(), like=like)
        for found, wanted in zip(value.shape, like.shape):
            checks.same_size(op, f"{name} must have the size of q", found, wanted)
    return _check(q, k, v, *settings)


@dataclasses.dataclass(frozen=True)
class _Ring:
    """The ring as seen from this rank, and what is attended to at each step."""

    causal: bool
    scale: float
    group_name: str

    @property
    def num_steps(self) -> int:
        return _group_size(self.group_name)

    def is_last(self, step: int) -> bool:
        return step == self.num_steps - 1

    def ranges(self, step: int, num_tokens: int) -> tuple[int, int, bool]:
        """First query, number of keys, and whether they are this rank's own under the mask."""
        if not self.causal or step == 0:
            return 0, num_tokens, self.causal
        if step <= _group_rank(self.group_name):
            return 0, num_tokens // 2, False
        return num_tokens // 2, num_tokens, False

    def start(self, buf: torch.Tensor, dep: torch.Tensor) -> torch.Tensor:
        """Hand on `buf`, after `dep` exists; what `wait` makes of the result comes from before."""
        if torch.compiler.is_compiling():  # a graph pass makes halves of it, after the partitioner
            return torch.ops.moe_ops.cp_shift.default(buf, dep, 1, self.group_name)
        return torch.ops.moe_ops.cp_shift_start.default(buf, dep, 1, self.group_name)

    def wait(self, started: torch.Tensor, buf: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return started
        return torch.ops.moe_ops.cp_shift_wait.default(started, buf)


# NOTE: the compiler must see numbers, not a look-up: they decide the graph and the key it is cached
# under.
@torch.compiler.assume_constant_result
def _group_rank(group_name: str) -> int:
    return comm.group_rank(group_name)


@torch.compiler.assume_constant_result
def _group_size(group_name: str) -> int:
    return comm.group_size(group_name)


def _pack(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Both in one flat message, of which they are read, too: it is saved in place of them."""
    return torch.stack([k, v]).flatten()


def _unpack(buf: torch.Tensor, like: torch.Tensor) -> tuple[torch.Tensor, ...]:
    # NOTE: not unbind, whose results the partitioner would save beside buf.
    both = buf.view(2, *like.shape)
    return both[0], both[1]


def _from(x: torch.Tensor, first: int) -> torch.Tensor:
    """The tokens from `first` on."""
    # NOTE: a slice of everything would make the partitioner save x twice.
    return x[:, :, first:] if first else x


def _up_to(x: torch.Tensor, number: int) -> torch.Tensor:
    """The first `number` tokens."""
    return x[:, :, :number] if number < x.shape[2] else x


def _reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float, group_name: str
) -> tuple[torch.Tensor, torch.Tensor]:
    ring, num_tokens = _Ring(causal, scale, group_name), q.shape[2]
    buf = started = _pack(k, v)
    out = lse = q
    for step in range(ring.num_steps):
        if not ring.is_last(step):
            started = ring.start(buf, buf)
        first, num_keys, masked = ring.ranges(step, num_tokens)
        keys, values = (_up_to(x, num_keys) for x in _unpack(buf, k))
        block, block_lse = _flash(_from(q, first), keys, values, masked, scale)
        block = block.to(layout.accumulate_dtype(q.dtype))
        out, lse = (block, block_lse) if step == 0 else _merge(out, lse, block, block_lse, first)
        if not ring.is_last(step):
            buf = ring.wait(started, buf)
    # NOTE: a new tensor. torch 2.11 returns each step's from `_Traced`, too, not differentiable:
    # where one was the same as `out` (a cast that changes nothing), gradients were 0.
    return out.contiguous().to(q.dtype, copy=True), lse.contiguous()


def _merge(
    out: torch.Tensor, lse: torch.Tensor, block: torch.Tensor, block_lse: torch.Tensor, first: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Out and lse, their queries from `first` on with more keys."""
    old_out, old_lse = _from(out, first), _from(lse, first)
    share = torch.sigmoid(block_lse - old_lse).unsqueeze(-1)
    new_out = old_out + share * (block - old_out)
    new_lse = torch.logaddexp(old_lse, block_lse)
    if not first:
        return new_out, new_lse
    return torch.cat([out[:, :, :first], new_out], 2), torch.cat([lse[:, :, :first], new_lse], 2)


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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradient of keys and values goes around with them, and at last home."""
    ring, num_tokens = _Ring(causal, scale, group_name), q.shape[2]
    wide = layout.accumulate_dtype(q.dtype)
    buf = started = _pack(k, v)
    grad_q = own = travelling = returning = q
    for step in range(ring.num_steps):
        if not ring.is_last(step):
            started = ring.start(buf, grad)
        first, num_keys, masked = ring.ranges(step, num_tokens)
        keys, values = (_up_to(x, num_keys) for x in _unpack(buf, k))
        grad_here, q_here, out_here, lse_here = (_from(x, first) for x in (grad, q, out, lse))
        block_q, *block_kv = _flash_backward(
            grad_here, q_here, keys, values, out_here, lse_here.contiguous(), masked, scale
        )
        block_q = pad(block_q.to(wide), (0, 0, first, 0))
        grad_kv = pad(torch.stack(block_kv).to(wide), (0, 0, 0, num_tokens - num_keys)).flatten()
        grad_q = block_q if step == 0 else grad_q + block_q
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
    grad_k, grad_v = _unpack(own.to(q.dtype), k)
    return grad_q.to(q.dtype).contiguous(), grad_k.clone(), grad_v.clone()


def _flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, masked: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of some queries to some keys: out, lse."""
    if q.device.type == "cuda":
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention.default(
            q, k, v, 0.0, masked, False, scale=scale
        )
    else:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(
            q, k, v, 0.0, masked, scale=scale
        )
    return out, lse


def _flash_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    masked: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k, v; out and lse of these queries are those over all keys."""
    if q.device.type != "cuda":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
            grad, q, k, v, out, lse, 0.0, masked, scale=scale
        )
    unread = q.new_empty(2, dtype=torch.uint64)  # the random state, without dropout
    return torch.ops.aten._scaled_dot_product_flash_attention_backward.default(
        grad,
        q,
        k,
        v,
        out,
        lse,
        None,
        None,
        q.shape[2],
        k.shape[2],
        0.0,
        masked,
        unread,
        unread,
        scale=scale,
    )


def _fake(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float, group_name: str
) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = layout.accumulate_dtype(q.dtype)
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=dtype)


def _backward_fake(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), k.new_empty(k.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    q, k, v, ctx.causal, ctx.scale, ctx.group_name = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.mark_non_differentiable(output[1])


def _gradients(run: Any, ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Of the operator's arguments, by `run`: the backward operator, or what it does."""
    return *run(grad, *ctx.saved_tensors, ctx.causal, ctx.scale, ctx.group_name), None, None, None


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
    "cp_attention(Tensor q, Tensor k, Tensor v, bool causal, float scale, str group_name)"
    " -> (Tensor out, Tensor lse)",
    check=_check,
    reference=_reference,
    fake=_fake,
    setup_context=_setup_context,
    backward=_backward,
)
_cp_attention_backward = _library.define(
    "cp_attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse,"
    " bool causal, float scale, str group_name)"
    " -> (Tensor grad_q, Tensor grad_k, Tensor grad_v)",
    check=_check_backward,
    reference=_backward_reference,
    fake=_backward_fake,
)
