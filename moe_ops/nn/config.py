"""What a layer and its router are made from. Every impossible combination is an error here, before
anything is built.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from typing import Any

from .. import checks
from ..comm.wire import FORMATS
from ..ops.topk_route import SCORES

ACTIVATIONS = ("swiglu", "geglu", "relu2", "swiglu_clamped")
BALANCING = ("aux", "seq_aux", "global_aux", "sinkhorn")
DISPATCHERS = ("flex", "alltoall", "allgather")


def _check_types(config: Any) -> None:
    """Every field holds what its annotation says; numbers are finite, and no bool is one."""
    name = type(config).__name__
    for field, hint in typing.get_type_hints(type(config)).items():
        value = getattr(config, field)
        kinds = tuple(typing.get_origin(kind) or kind for kind in typing.get_args(hint)) or (hint,)
        if typing.get_origin(hint) is tuple:
            kinds = (tuple,)
        allowed = (*kinds, int) if float in kinds else kinds
        if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in kinds):
            expected = hint.__name__ if isinstance(hint, type) else hint
            raise TypeError(f"{name}: {field} must be {expected}, got {value!r}")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{name}: {field} must be finite, got {value!r}")


def _demand(config: str, condition: bool, rule: str, value: object) -> None:
    if not condition:
        raise ValueError(f"{config}: {rule}, got {value!r}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """How tokens choose experts.

    `score`, `score_first`, `normalize`, `scale`, `num_groups`, `top_groups`, `group_score_top`: see
        `topk_route`.
    `logit_bias`: logits have a bias, a parameter, that moves selection and weights alike (gpt-oss).
    `expert_bias`: a bias for selection alone, moved by `bias_update_rate` against the load at each
        `update_expert_bias` (arXiv:2408.15664).
    `balancing`: any of "aux" (per micro-batch), "seq_aux" (per sequence), "global_aux" (counts of
        all ranks), each a loss with coefficient `aux_loss_coeff`; or "sinkhorn" alone, which
        balances the choice while training.
    `z_loss_coeff`: coefficient of mean(logsumexp(logits)^2) (arXiv:2202.08906).
    `jitter_eps`: while training, inputs of the gate are multiplied by uniform(1 - eps, 1 + eps).
    `expert_capacity_factor`: an expert takes at most ceil(T * K / E * factor) of this rank's
        tokens, those with the largest weights (`drop_policy="probs"`) or the first (`"position"`);
        None = no limit.
    `pad_to_capacity`: every expert's buffer has exactly that many rows for each rank.
    """

    score: str = "softmax"
    score_first: bool = True
    normalize: bool = True
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    group_score_top: int = 0
    logit_bias: bool = False
    expert_bias: bool = False
    bias_update_rate: float = 1e-3
    balancing: tuple[str, ...] = ()
    aux_loss_coeff: float = 0.0
    z_loss_coeff: float = 0.0
    jitter_eps: float = 0.0
    expert_capacity_factor: float | None = None
    drop_policy: str = "probs"
    pad_to_capacity: bool = False

    def __post_init__(self) -> None:
        name = "RouterConfig"
        _check_types(self)
        checks.one_of(name, "score", self.score, SCORES)
        checks.one_of(name, "drop_policy", self.drop_policy, ("probs", "position"))
        repeated = len(set(self.balancing)) < len(self.balancing)
        _demand(name, not repeated, "balancing must name each kind once", self.balancing)
        for kind in self.balancing:
            checks.one_of(name, "balancing", kind, BALANCING)
        for field in ("aux_loss_coeff", "z_loss_coeff", "bias_update_rate"):
            value = getattr(self, field)
            _demand(name, value >= 0, f"{field} must not be negative", value)
        _demand(name, 0 <= self.jitter_eps < 1, "jitter_eps must be in [0, 1)", self.jitter_eps)
        checks.positive(name, "num_groups", self.num_groups)
        _demand(
            name,
            1 <= self.top_groups <= self.num_groups,
            f"top_groups must be in 1 .. num_groups = {self.num_groups}",
            self.top_groups,
        )
        _demand(
            name,
            "sinkhorn" not in self.balancing or len(self.balancing) == 1,
            "sinkhorn must be the only balancing",
            self.balancing,
        )
        _demand(
            name,
            "sinkhorn" not in self.balancing or not (self.expert_bias or self.num_groups > 1),
            "sinkhorn must go without expert_bias and groups",
            (self.expert_bias, self.num_groups),
        )
        losses = set(self.balancing) - {"sinkhorn"}
        _demand(
            name,
            bool(losses) == (self.aux_loss_coeff > 0),
            f"aux_loss_coeff must be positive exactly if balancing names a loss, {self.balancing}",
            self.aux_loss_coeff,
        )
        factor = self.expert_capacity_factor
        _demand(
            name,
            factor is None or factor > 0,
            "expert_capacity_factor must be positive or None",
            factor,
        )
        _demand(
            name,
            factor is not None or not self.pad_to_capacity,
            "pad_to_capacity must come with an expert_capacity_factor",
            factor,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """One mixture-of-experts layer: hidden_size H, ffn_hidden_size F, num_experts E, top_k K.

    `activation`: "swiglu", "geglu", "relu2" (squared ReLU, no gate) or "swiglu_clamped" (gpt-oss).
    `bias`: experts have biases; the down bias is weighted by the gate weight.
    `dispatcher`: "flex" (one copy a token and rank), "alltoall" (one row a slot) or "allgather"
        (every token everywhere). All three give the same outputs and gradients, to rounding.
    `size_mode`: "exact" reads sizes from the device once a layer; "capacity" never does and needs
        `max_tokens`.
    `max_tokens`: most tokens a rank may hold, equal on all ranks. 0 = no bound (exact mode).
    `copy_capacity` D, `row_capacity` C: capacity mode; default P * max_tokens and D * min(K, E /
        P), which hold every routing without repeated experts. The alltoall and allgather
        dispatchers keep rows only, so C alone bounds them; D still decides which copies exist.
    `weights_at`: gate weights multiply at the "activation" or in the sum of "unpermute".
    `wire`: format of dispatched rows, see `dispatch`; "full" for dispatchers other than flex.
    `shared_ffn_hidden_size`: width of a shared expert that every token passes, 0 = none;
        `shared_gate`: times sigmoid(x @ gate) (arXiv:2407.10671).
    """

    hidden_size: int
    ffn_hidden_size: int
    num_experts: int
    top_k: int
    activation: str = "swiglu"
    bias: bool = False
    dispatcher: str = "flex"
    size_mode: str = "exact"
    max_tokens: int = 0
    copy_capacity: int | None = None
    row_capacity: int | None = None
    weights_at: str = "activation"
    wire: str = "full"
    shared_ffn_hidden_size: int = 0
    shared_gate: bool = False
    router: RouterConfig = dataclasses.field(default_factory=RouterConfig)

    def __post_init__(self) -> None:
        name = "MoEConfig"
        _check_types(self)
        for field in ("hidden_size", "ffn_hidden_size", "num_experts", "top_k"):
            checks.positive(name, field, getattr(self, field))
        for field in ("max_tokens", "shared_ffn_hidden_size", "copy_capacity", "row_capacity"):
            checks.capacity(name, field, getattr(self, field))
        checks.one_of(name, "activation", self.activation, ACTIVATIONS)
        checks.one_of(name, "dispatcher", self.dispatcher, DISPATCHERS)
        checks.one_of(name, "size_mode", self.size_mode, ("exact", "capacity"))
        checks.one_of(name, "weights_at", self.weights_at, ("activation", "unpermute"))
        checks.one_of(name, "wire", self.wire, FORMATS)
        self._check_sizes(name)
        self._check_routing(name)

    def _check_sizes(self, name: str) -> None:
        capacity = self.size_mode == "capacity"
        _demand(
            name,
            not capacity or self.max_tokens > 0,
            "max_tokens must be positive with size_mode='capacity'",
            self.max_tokens,
        )
        given = (self.copy_capacity, self.row_capacity)
        _demand(
            name,
            capacity or given == (None, None),
            "copy_capacity and row_capacity must come with size_mode='capacity'",
            given,
        )
        _demand(
            name,
            self.wire == "full" or self.dispatcher == "flex",
            "wire must be 'full' unless the dispatcher is 'flex'",
            self.wire,
        )
        _demand(
            name,
            self.shared_ffn_hidden_size > 0 or not self.shared_gate,
            "shared_gate must come with a shared_ffn_hidden_size",
            self.shared_ffn_hidden_size,
        )

    def _check_routing(self, name: str) -> None:
        experts, groups = self.num_experts, self.router.num_groups
        _demand(
            name,
            self.top_k <= experts,
            f"top_k must be at most num_experts = {experts}",
            self.top_k,
        )
        _demand(
            name, experts % groups == 0, f"router.num_groups must divide {experts} experts", groups
        )
        eligible = experts // groups * self.router.top_groups
        _demand(
            name,
            self.top_k <= eligible,
            f"top_k must fit into the {eligible} experts of router.top_groups groups",
            self.top_k,
        )
        _demand(
            name,
            0 <= self.router.group_score_top <= experts // groups,
            f"router.group_score_top must be in 0 .. {experts // groups}",
            self.router.group_score_top,
        )
        _demand(
            name,
            not self.router.pad_to_capacity
            or (self.copy_capacity, self.row_capacity) == (None,) * 2,
            "copy_capacity and row_capacity must be None with router.pad_to_capacity",
            (self.copy_capacity, self.row_capacity),
        )
