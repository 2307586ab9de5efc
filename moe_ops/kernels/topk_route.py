"""Triton kernel of topk_route: a program is one warp with a few tokens.

Values are ordered by integers of the same order, in which 0 = -0 and NaN is the largest, as in
torch.sort. A choice is the largest of its row, the first of equals, and is then struck out by its
place, so ids are distinct whatever the logits.

Letters as in `moe_ops.ops.topk_route`: T tokens, K top-k, E experts; G groups of S experts; -1 =
none; R a `Routing`. E, G and S are padded to powers of two; a row's experts have places [G, S].
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .. import checks
from .blocks import ceil_div, power_of_two_from
from .kernel import Kernel

MAX_EXPERTS = 1024
MAX_TOP_K = 32
# A warp's tile of logits: 16 elements a thread, at least so many places a row.
_TILE = 512
_MIN_PLACES = 16

_STRUCK_OUT = tl.constexpr(-(2**31))  # less than the key of any value
_LARGEST = tl.constexpr(2**31 - 1)
_INFINITY_BITS = tl.constexpr(0x7F800000)
_LOWEST_FLOAT = tl.constexpr(torch.finfo(torch.float32).min)


class Routing(NamedTuple):
    """What kernels are compiled for.

    `over_all`: the score is a softmax over all experts. `packed`: the order of experts is that of
    16-bit logits. `places` of a row: groups of `group_size` places, `size` of which are experts.
    `choices`: K padded; `unroll` divides K. `tokens`: of a program.
    """

    score: str
    over_all: bool
    normalize: bool
    packed: bool
    num_experts: int
    top_k: int
    num_groups: int
    top_groups: int
    group_best: int
    size: int
    group_size: int
    places: int
    choices: int
    unroll: int
    tokens: int


@triton.jit
def _keys_of(values):
    """Integers in the order of float32 values."""
    bits = values.to(tl.int32, bitcast=True)
    magnitude = bits & _LARGEST
    keys = tl.where(magnitude == 0, 0, bits ^ ((bits >> 31) & _LARGEST))
    return tl.where(magnitude > _INFINITY_BITS, _LARGEST, keys)


@triton.jit
def _values_of(keys):
    return (keys ^ ((keys >> 31) & _LARGEST)).to(tl.float32, bitcast=True)


@triton.jit
def _first_of_largest(keys, PACKED: tl.constexpr = False):
    """Largest key along the last dimension, its place there, and the keys with it struck out.

    PACKED keys end in the bits of size - 1 - place.
    """
    AXIS: tl.constexpr = len(keys.shape) - 1
    SIZE: tl.constexpr = keys.shape[AXIS]
    places = tl.arange(0, SIZE)
    for _ in tl.static_range(AXIS):
        places = tl.expand_dims(places, 0)
    largest = tl.max(keys, AXIS)
    if PACKED:
        place = SIZE - 1 - (largest & (SIZE - 1))
    else:
        place = tl.min(tl.where(keys == tl.expand_dims(largest, AXIS), places, SIZE), AXIS)
    rest = tl.where(places == tl.expand_dims(place, AXIS), _STRUCK_OUT, keys)
    return largest, place, rest


@triton.jit
def _strike_out_groups(keys_TE, value_keys_TE, R: tl.constexpr):
    """Leave the `top_groups` groups whose `group_best` largest values have the largest sum."""
    GROUPS: tl.constexpr = R.places // R.group_size
    rest_TGS = tl.reshape(value_keys_TE, [R.tokens, GROUPS, R.group_size])
    sum_TG = tl.full([R.tokens, GROUPS], 0.0, tl.float32)
    for _ in range(R.group_best):
        largest_TG, _member, rest_TGS = _first_of_largest(rest_TGS)
        sum_TG += _values_of(largest_TG)
    group_1G = tl.arange(0, GROUPS)[None, :]
    rest_TG = tl.where(group_1G < R.num_groups, _keys_of(sum_TG), _STRUCK_OUT)
    for _ in range(R.top_groups):
        _largest, _group, rest_TG = _first_of_largest(rest_TG)
    lost_TG = (rest_TG != _STRUCK_OUT) | (group_1G >= R.num_groups)
    keys_TGS = tl.reshape(keys_TE, [R.tokens, GROUPS, R.group_size])
    keys_TGS = tl.where(lost_TG[:, :, None], _STRUCK_OUT, keys_TGS)
    return tl.reshape(keys_TGS, [R.tokens, R.places])


@triton.jit
def _elementwise_scores(logits, R: tl.constexpr):
    if R.score == "sigmoid":
        scores = tl.sigmoid(logits)
    else:
        # log(1 + e) is log1p(e) but for the rounding of 1 + e, which the quotient undoes.
        e = tl.exp(logits)
        rounded = 1 + e - 1
        log1p = tl.where(rounded == 0, e, tl.log(1 + e) * (e / rounded))
        scores = tl.sqrt(tl.where(logits > 20, logits, log1p))
    return scores


@triton.jit
def softmax_terms(logits_TE):
    """Largest logit, exponentials relative to it, their sum."""
    largest_T = tl.max(logits_TE, 1)
    exponentials_TE = tl.exp(logits_TE - largest_T[:, None])
    return largest_T, exponentials_TE, tl.sum(exponentials_TE, 1)


@triton.jit
def scores_of_choices(logits_TK, held_TK, logits_TE, R: tl.constexpr):
    """Scores before normalize and scale, 0 where there is no choice; `over_all` needs logits_TE."""
    if R.over_all:
        largest_T, _exponentials, total_T = softmax_terms(logits_TE)
        scores_TK = tl.exp(logits_TK - largest_T[:, None]) / total_T[:, None]
        scores_TK = tl.where(held_TK, scores_TK, 0)
    elif R.score == "softmax":
        logits_TK = tl.where(held_TK, logits_TK, -float("inf"))
        largest_T = tl.max(logits_TK, 1)
        largest_T = tl.where(largest_T < _LOWEST_FLOAT, _LOWEST_FLOAT, largest_T)
        # Not masked: as in the reference, a NaN among the choices makes all weights NaN.
        exponentials_TK = tl.exp(logits_TK - largest_T[:, None])
        total_T = tl.sum(exponentials_TK, 1)
        scores_TK = exponentials_TK / tl.where(total_T < 1e-20, 1e-20, total_T)[:, None]
    else:
        scores_TK = tl.where(held_TK, _elementwise_scores(logits_TK, R), 0)
    return scores_TK


@triton.jit
def slots(num_tokens, R: tl.constexpr):
    """Tokens of this program, their slots, which of those there are."""
    token_T = tl.program_id(0).to(tl.int64) * R.tokens + tl.arange(0, R.tokens)
    k_1K = tl.arange(0, R.choices)[None, :]
    real_TK = (token_T < num_tokens)[:, None] & (k_1K < R.top_k)
    return token_T, token_T[:, None] * R.top_k + k_1K, real_TK


@triton.jit
def _experts(R: tl.constexpr):
    """Expert of each place and whether there is one."""
    place_E = tl.arange(0, R.places)
    expert_E = place_E
    if R.num_groups > 1 and R.size < R.group_size:
        expert_E = place_E // R.group_size * R.size + place_E % R.group_size
    return expert_E, (expert_E < R.num_experts) & (place_E % R.group_size < R.size)


@triton.jit
def rows(token_T, num_tokens, R: tl.constexpr):
    """Where rows of logits lie, and which elements there are."""
    expert_E, exists_E = _experts(R)
    inside_TE = (token_T < num_tokens)[:, None] & exists_E[None, :]
    return token_T[:, None] * R.num_experts + expert_E[None, :], inside_TE


@triton.jit
def load_choices(logits_ptr, token_T, ids_TK, R: tl.constexpr):
    """Logits of the choices in float32, and which there are."""
    held_TK = (ids_TK >= 0) & (ids_TK < R.num_experts)
    source_TK = logits_ptr + token_T[:, None] * R.num_experts + ids_TK
    return tl.load(source_TK, mask=held_TK, other=0).to(tl.float32), held_TK


@triton.jit
def _select(logits_TE, bias_ptr, R: tl.constexpr):
    """The choices, -1 past `top_k`."""
    expert_E, exists_E = _experts(R)
    keys_TE = tl.where(exists_E[None, :], _keys_of(logits_TE), _STRUCK_OUT)
    if bias_ptr is not None or R.num_groups > 1:
        values_TE = logits_TE
        if R.over_all:
            _largest, exponentials_TE, total_T = softmax_terms(logits_TE)
            values_TE = exponentials_TE / total_T[:, None]
        elif R.score != "softmax":
            values_TE = _elementwise_scores(logits_TE, R)
        if bias_ptr is not None:
            bias_E = tl.load(bias_ptr + expert_E, mask=exists_E, other=0).to(tl.float32)
            values_TE += bias_E[None, :]
        value_keys_TE = tl.where(exists_E[None, :], _keys_of(values_TE), _STRUCK_OUT)
        if bias_ptr is not None:
            keys_TE = value_keys_TE
        if R.num_groups > 1:
            keys_TE = _strike_out_groups(keys_TE, value_keys_TE, R)
    if R.packed:
        place_1E = tl.arange(0, R.places)[None, :]
        packed_TE = (keys_TE & -R.places) | (R.places - 1 - place_1E)
        keys_TE = tl.where(keys_TE == _STRUCK_OUT, keys_TE, packed_TE)
    k_1K = tl.arange(0, R.choices)[None, :]
    ids_TK = tl.full([R.tokens, R.choices], -1, tl.int32)
    UNROLL: tl.constexpr = R.unroll
    for first in range(0, R.top_k, UNROLL):
        for step in tl.static_range(UNROLL):
            # NOTE: `_key` is no name from above, which the loop would carry, with the type it had.
            _key, id_T, keys_TE = _first_of_largest(keys_TE, R.packed)
            if R.num_groups > 1 and R.size < R.group_size:
                id_T = id_T // R.group_size * R.size + id_T % R.group_size
            ids_TK = tl.where(k_1K == first + step, id_T[:, None], ids_TK)
    return ids_TK


@triton.jit(do_not_specialize=["num_tokens"])
def topk_route_fwd_kernel(
    logits_ptr,
    bias_ptr,
    given_ptr,
    mask_ptr,
    weights_ptr,
    ids_ptr,
    num_tokens,
    scale,
    R: tl.constexpr,
):
    """Choose, unless ids are given; then weigh the choices."""
    token_T, slot_TK, real_TK = slots(num_tokens, R)
    logits_TE = None
    if given_ptr is None or R.over_all:
        offset_TE, inside_TE = rows(token_T, num_tokens, R)
        logits_TE = tl.load(logits_ptr + offset_TE, mask=inside_TE, other=-float("inf"))
        logits_TE = logits_TE.to(tl.float32)
    if given_ptr is None:
        ids_TK = _select(logits_TE, bias_ptr, R)
    else:
        ids_TK = tl.load(given_ptr + slot_TK, mask=real_TK, other=-1).to(tl.int32)
    if mask_ptr is not None:
        kept_T = tl.load(mask_ptr + token_T, mask=token_T < num_tokens, other=0)
        ids_TK = tl.where(kept_T[:, None] != 0, ids_TK, -1)
    tl.store(ids_ptr + slot_TK, ids_TK, mask=real_TK)
    if given_ptr is None:
        # Read back one choice a thread: selection leaves every choice with all threads of a row.
        tl.debug_barrier()
        ids_TK = tl.load(ids_ptr + slot_TK, mask=real_TK, other=-1)
    logits_TK, held_TK = load_choices(logits_ptr, token_T, ids_TK, R)
    weights_TK = scores_of_choices(logits_TK, held_TK, logits_TE, R)
    if R.normalize:
        weights_TK = weights_TK / (tl.sum(weights_TK, 1) + 1e-20)[:, None]
    tl.store(weights_ptr + slot_TK, weights_TK * scale, mask=real_TK)


@functools.cache
def routing_of(
    num_experts: int,
    top_k: int,
    score: str,
    score_first: bool,
    normalize: bool,
    groups: tuple[int, int, int] = (1, 1, 0),
    packed: bool = False,
) -> Routing:
    """`groups`: num_groups, top_groups, group_score_top."""
    num_groups, top_groups, group_score_top = groups
    if top_groups == num_groups:
        num_groups = top_groups = 1
    size = num_experts // num_groups
    group_size = power_of_two_from(size)
    places = group_size * power_of_two_from(num_groups)
    if num_groups == 1:
        places = group_size = max(places, _MIN_PLACES)
    return Routing(
        score=score,
        over_all=score == "softmax" and score_first,
        normalize=normalize and top_k > 1,
        packed=packed,
        num_experts=num_experts,
        top_k=top_k,
        num_groups=num_groups,
        top_groups=top_groups,
        group_best=min(group_score_top or max(top_k // top_groups, 1), size),
        size=size,
        group_size=group_size,
        places=places,
        choices=power_of_two_from(top_k),
        unroll=next(u for u in range(8, 0, -1) if top_k % u == 0),
        tokens=max(1, min(_TILE // places, 32)),
    )


def topk_route(
    logits_TE: torch.Tensor,
    bias_E: torch.Tensor | None,
    ids_TK: torch.Tensor | None,
    mask_T: torch.Tensor | None,
    top_k: int,
    score: str = "softmax",
    score_first: bool = True,
    normalize: bool = True,
    scale: float = 1.0,
    num_groups: int = 1,
    top_groups: int = 1,
    group_score_top: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator `topk_route`."""
    num_tokens, num_experts = logits_TE.shape
    if ids_TK is not None:
        checks.ids_in_range("topk_route", "ids_TK", ids_TK, num_experts)
    weights_TK = logits_TE.new_empty(num_tokens, top_k, dtype=torch.float32)
    chosen_TK = logits_TE.new_empty(num_tokens, top_k, dtype=torch.int32)
    if num_tokens == 0:
        return weights_TK, chosen_TK
    groups = num_groups, top_groups, group_score_top
    packed = bias_E is None and logits_TE.dtype != torch.float32
    routing = routing_of(num_experts, top_k, score, score_first, normalize, groups, packed)
    topk_route_fwd_kernel[programs_of(num_tokens, routing)](
        logits_TE.contiguous(),
        None if bias_E is None else bias_E.contiguous(),
        None if ids_TK is None else ids_TK.contiguous(),
        None if mask_T is None else mask_T.contiguous().view(torch.uint8),
        weights_TK,
        chosen_TK,
        num_tokens,
        scale,
        R=routing,
        num_warps=warps_of(routing),
    )
    return weights_TK, chosen_TK


def programs_of(num_tokens: int, routing: Routing) -> tuple[int]:
    """The grid."""
    return (ceil_div(num_tokens, routing.tokens),)


def warps_of(routing: Routing) -> int:
    """Warps of a program: one, unless a row is too long for the registers of a warp."""
    return max(1, routing.places // MAX_EXPERTS)


def serves(logits_TE: torch.Tensor, top_k: int) -> bool:
    """Whether these kernels take logits of such a dtype and sizes."""
    sizes_fit = 1 <= logits_TE.shape[1] <= MAX_EXPERTS and 1 <= top_k <= MAX_TOP_K
    return sizes_fit and logits_TE.dtype != torch.float64


def _takes(
    logits_TE: torch.Tensor,
    bias_E: torch.Tensor | None,
    ids_TK: torch.Tensor | None,
    mask_T: torch.Tensor | None,
    top_k: int,
    *options: object,
) -> bool:
    return serves(logits_TE, top_k)


KERNELS: dict[str, list[Kernel]] = {"topk_route": [Kernel("triton", _takes, topk_route)]}
