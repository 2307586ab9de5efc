"""The router: a gate's logits, each token's experts and weights, and what balances their load.

Letters: T tokens here, K top-k, E experts, H hidden; -1 = none.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fractions
from collections.abc import Callable
from typing import Any, Self

import torch
import torch.distributed as dist

from .. import checks, comm, layout
from ..comm.groups import device_of, resolve
from ..ops.router_linear import router_linear
from ..ops.topk_route import topk_route
from . import balancing
from .config import RouterConfig

# Standard deviation of the gate's initial weights, as in GPT-2, Megatron-Core and transformers.
INIT_STD = 0.02
# Capacity factors are rounded to fractions of at most this denominator: a float near 4/3 counts as
# 4/3, and products with any number of tokens stay in 64 bits.
_MAX_DENOMINATOR = 10**6


@dataclasses.dataclass(frozen=True)
class Routing:
    """What a router decided for T tokens.

    `weights_TK` [T, K] f32 (f64 if the tokens are), `ids_TK` [T, K] i32: as from `topk_route`;
        choices dropped for capacity are id -1, weight 0.
    `chosen_TK` [T, K] i32: the choice before any was dropped, which a replay needs.
    `losses`: scalars by name ("aux", "seq_aux", "global_aux", "z"), coefficients included; add them
        to the loss. Empty in eval mode.
    `expert_capacity`: most choices an expert may hold; None = no limit.
    `dropped` [] i64: choices that found no place.
    """

    weights_TK: torch.Tensor
    ids_TK: torch.Tensor
    chosen_TK: torch.Tensor
    losses: dict[str, torch.Tensor]
    expert_capacity: int | None
    dropped: torch.Tensor


class Router(torch.nn.Module):
    """Chooses `top_k` of `num_experts` for each token by logits = x @ weight.T + bias.

    Logits, scores and losses are float32 whatever the weight's dtype and autocast are, float64 if
    the tokens are.

    Args:
        config: how; see `RouterConfig`.
        group: the ranks whose tokens "global_aux" and the expert bias balance together; None = this
            process.
        max_tokens: most tokens a rank may hold; with `pad_to_capacity` it makes the capacity equal
            on all ranks. 0 = the capacity follows each batch.

    Parameters `weight` [E, H] and `bias` [E], None unless configured. Buffer `expert_bias` [E],
    float32 through every cast of the module, in the state_dict; None unless configured. Counters,
    int64 and not in the state_dict, of the training steps since `reset_counters` or
    `update_expert_bias`: `tokens_per_expert` [E], choices before any are dropped, and `dropped` [].
    They differ by rank: DistributedDataParallel around a router needs broadcast_buffers=False.
    """

    bias: torch.nn.Parameter | None
    expert_bias: torch.Tensor | None
    tokens_per_expert: torch.Tensor
    dropped: torch.Tensor

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        config: RouterConfig,
        *,
        group: dist.ProcessGroup | str | None = None,
        max_tokens: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.num_experts = num_experts
        self.top_k = top_k
        self.config = config
        self.group_name = comm.group_name_of(group)
        self.max_tokens = max_tokens
        self._capacity_ratio = _ratio(config.expert_capacity_factor)
        weight = torch.empty(num_experts, hidden_size, device=device, dtype=dtype)
        self.weight = torch.nn.Parameter(weight)
        logit_bias = torch.nn.Parameter(weight.new_empty(num_experts))
        self.register_parameter("bias", logit_bias if config.logit_bias else None)
        bias = torch.empty(num_experts, device=device, dtype=torch.float32)
        self.register_buffer("expert_bias", bias if config.expert_bias else None)
        counts = torch.empty(num_experts, device=device, dtype=torch.int64)
        self.register_buffer("tokens_per_expert", counts, persistent=False)
        self.register_buffer("dropped", counts.new_empty(()), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight from N(0, 0.02^2); biases and counters become 0."""
        torch.nn.init.normal_(self.weight, std=INIT_STD)
        if self.bias is not None:
            torch.nn.init.zeros_(self.bias)
        if self.expert_bias is not None:
            self.expert_bias.zero_()
        self.reset_counters()

    def reset_counters(self) -> None:
        """Start counting anew."""
        self.tokens_per_expert.zero_()
        self.dropped.zero_()

    def extra_repr(self) -> str:
        """The sizes, for print(module)."""
        return f"{self.hidden_size}, num_experts={self.num_experts}, top_k={self.top_k}"

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        # A bf16 bias near 1 would not move by 1e-3: casts of the module pass it by.
        before = self.expert_bias
        super()._apply(fn, recurse)
        after = self.expert_bias
        if before is not None and after is not None and after.dtype != before.dtype:
            self.expert_bias = before.to(after.device)
        return self

    def forward(
        self,
        x_TH: torch.Tensor,
        *,
        num_sequences: int = 1,
        mask_T: torch.Tensor | None = None,
        ids_TK: torch.Tensor | None = None,
    ) -> Routing:
        """Route tokens.

        Args:
            x_TH: [T, H], any floating dtype.
            num_sequences: for "seq_aux": the tokens are this many equally long sequences, one after
                another.
            mask_T: [T] bool; False = padding: not routed or counted, in no loss, and takes no
                capacity. Its values must be finite.
            ids_TK: [T, K] `chosen_TK` of an earlier routing (-1 = none) instead of a selection;
                weights, losses and drops follow as usual, nothing is counted again.

        Raises:
            TypeError, ValueError: wrong dtype, rank, size or device.
        """
        checks.tensor("Router", "x_TH", x_TH, 2, checks.FLOATS, like=self.weight)
        if x_TH.shape[1] != self.hidden_size:
            raise ValueError(
                f"Router: x_TH must have H = {self.hidden_size} columns, got {x_TH.shape[1]}"
            )
        config, replay = self.config, ids_TK is not None
        with _without_autocast(x_TH.device.type):
            logits_TE = self._logits(x_TH)
            weights_TK, chosen_TK = self._choose(logits_TE, ids_TK, mask_T)
            losses = self._losses(logits_TE, chosen_TK, mask_T, num_sequences)
            capacity = self._expert_capacity(x_TH.shape[0])
            ids_TK, dropped = chosen_TK, torch.zeros_like(self.dropped)
            if capacity is not None:
                weights_TK, ids_TK, dropped = balancing.drop_over_capacity(
                    weights_TK,
                    chosen_TK,
                    self.num_experts,
                    expert_capacity=capacity,
                    policy=config.drop_policy,
                )
            if self.training and not replay and not in_backward():
                self._count(chosen_TK, dropped)
        return Routing(weights_TK, ids_TK, chosen_TK, losses, capacity, dropped)

    def _logits(self, x_TH: torch.Tensor) -> torch.Tensor:
        eps = self.config.jitter_eps
        if self.training and eps > 0:
            x_TH = x_TH.to(layout.accumulate_dtype(x_TH.dtype))
            x_TH = x_TH * (1 - eps + 2 * eps * torch.rand_like(x_TH))
        logits_TE = router_linear(x_TH, self.weight)
        return logits_TE if self.bias is None else logits_TE + self.bias.to(logits_TE.dtype)

    def _choose(
        self, logits_TE: torch.Tensor, ids_TK: torch.Tensor | None, mask_T: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        config = self.config
        if self.training and config.balancing == ("sinkhorn",) and ids_TK is None:
            plan_TE = balancing.sinkhorn(logits_TE, mask_T)
            _, ids_TK = topk_route(plan_TE, top_k=self.top_k, score_first=False)
        return topk_route(
            logits_TE,
            self.expert_bias,
            ids_TK,
            mask_T,
            top_k=self.top_k,
            score=config.score,
            score_first=config.score_first,
            normalize=config.normalize,
            scale=config.scale,
            num_groups=config.num_groups,
            top_groups=config.top_groups,
            group_score_top=config.group_score_top,
        )

    def _losses(
        self,
        logits_TE: torch.Tensor,
        ids_TK: torch.Tensor,
        mask_T: torch.Tensor | None,
        num_sequences: int,
    ) -> dict[str, torch.Tensor]:
        config = self.config
        losses: dict[str, torch.Tensor] = {}
        if not self.training:
            return losses
        given = (logits_TE, ids_TK, mask_T)
        if "aux" in config.balancing:
            losses["aux"] = balancing.aux_loss(*given, score=config.score)
        if "seq_aux" in config.balancing:
            losses["seq_aux"] = balancing.seq_aux_loss(
                *given, num_sequences=num_sequences, score=config.score
            )
        if "global_aux" in config.balancing:
            losses["global_aux"] = balancing.global_aux_loss(
                *given, group_name=self.group_name, score=config.score
            )
        losses = {name: loss * config.aux_loss_coeff for name, loss in losses.items()}
        if config.z_loss_coeff > 0:
            losses["z"] = balancing.z_loss(logits_TE, mask_T) * config.z_loss_coeff
        return losses

    def _expert_capacity(self, num_tokens: int) -> int | None:
        """ceil(T * K / E * factor), in integers: exact, and traced for any T."""
        if self._capacity_ratio is None:
            return None
        if self.config.pad_to_capacity and self.max_tokens > 0:
            num_tokens = self.max_tokens
        numerator, denominator = self._capacity_ratio
        denominator *= self.num_experts
        return (num_tokens * self.top_k * numerator + denominator - 1) // denominator

    @torch.no_grad()
    def _count(self, ids_TK: torch.Tensor, dropped: torch.Tensor) -> None:
        self.tokens_per_expert.add_(layout.count(ids_TK, self.num_experts))
        self.dropped.add_(dropped)

    def update_expert_bias(self) -> None:
        """`update_expert_bias` of this router alone."""
        update_expert_bias(self)

    def stats(self) -> dict[str, torch.Tensor]:
        """Copies of the counters, on their device: nothing waits for it.

        "tokens_per_expert" [E] i64; "dropped" [] i64; "max_load" [] f32: the fullest expert over
        the mean, 0 before any token.
        """
        counts_E = self.tokens_per_expert.clone()
        mean = counts_E.sum().clamp(min=1).float() / self.num_experts
        return {
            "tokens_per_expert": counts_E,
            "dropped": self.dropped.clone(),
            "max_load": counts_E.max().float() / mean,
        }


@torch.no_grad()
def update_expert_bias(
    module: torch.nn.Module, group: dist.ProcessGroup | str | None = None
) -> None:
    """At the end of a step: bias += rate * sign(mean load - load) in every router with a bias.

    Walks the routers inside `module`, compiled or not. Loads are their counters summed over `group`
    by one integer all-reduce; then the counters start anew (arXiv:2408.15664). Collective over
    `group`, default the routers' own: with data parallelism around expert parallelism pass the
    group of both.

    Raises:
        ValueError: no `group` is given and the routers' own differ.
    """
    routers = [
        router
        for router in module.modules()
        if isinstance(router, Router) and router.expert_bias is not None
    ]
    names = {router.group_name for router in routers}
    if group is None and len(names) > 1:
        raise ValueError(
            "update_expert_bias: the routers' groups must be the same, "
            f"got {sorted(names)}; pass `group`"
        )
    if not routers:
        return
    group_name = routers[0].group_name if group is None else comm.group_name_of(group)
    counts = torch.cat([router.tokens_per_expert for router in routers])
    if group_name:
        process_group = resolve(group_name)
        reduced = counts.to(device_of(process_group))
        dist.all_reduce(reduced, group=process_group)
        counts = reduced.to(counts.device)
    sizes = [router.num_experts for router in routers]
    for router, counts_E in zip(routers, counts.split(sizes)):
        # sign(mean - count) without a division.
        direction_E = (counts_E.sum() - counts_E * router.num_experts).sign()
        assert router.expert_bias is not None
        router.expert_bias.add_(direction_E, alpha=router.config.bias_update_rate)
        router.reset_counters()


def _ratio(factor: float | None) -> tuple[int, int] | None:
    if factor is None:
        return None
    exact = fractions.Fraction(str(factor)).limit_denominator(_MAX_DENOMINATOR)
    return max(exact, fractions.Fraction(1, _MAX_DENOMINATOR)).as_integer_ratio()


def in_backward() -> bool:
    """Whether a backward pass runs, so that a forward is activation checkpointing's second one.

    A compiled forward cannot ask. With the checkpoint inside the compiled region nothing is counted
    twice; a compiled region inside an eager checkpoint counts every token twice, which leaves the
    bias update, a comparison of loads, as it is.
    """
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def _without_autocast(device_type: str) -> contextlib.AbstractContextManager[Any]:
    # NOTE: not where it is off anyway: AOTAutograd's cache takes no graph that changes it.
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return contextlib.nullcontext()
    return torch.autocast(device_type, enabled=False)
