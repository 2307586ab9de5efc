"""Expert-parallel layers made from operators alone, to run on ranks and against the oracle."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist

import moe_ops
from moe_ops.testing import TOLERANCE, Case, Inputs, assert_close, moe_oracle

from .checks import group_of

GRADS = ("x_TH", "weights_TK", "w13", "w2")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A case on several ranks; `tokens` has one number a rank of `members`."""

    case: Case
    tokens: tuple[int, ...]
    chain: str = "flex"
    capacity: bool = False
    members: tuple[int, ...] = ()

    def inputs(self) -> list[Inputs]:
        """What each member holds; experts are the same everywhere."""
        cases = [dataclasses.replace(self.case, num_tokens=tokens) for tokens in self.tokens]
        return [case.make(seed, len(self.tokens)) for seed, case in enumerate(cases)]

    def plan_settings(self) -> dict[str, int]:
        if not self.capacity:
            return {}
        most = max([*self.tokens, 1])
        copies = most * len(self.tokens)
        return {
            "max_tokens": most,
            "copy_capacity": copies,
            "row_capacity": copies * self.case.top_k,
        }


def experts(rows_CH, w13, w2, offsets_L, activation: str, row_weights_C=None):
    """The two matmuls of every local expert and what lies between them."""
    options = {
        "swiglu": {},
        "geglu": {"act": "gelu"},
        "swiglu_clamped": {"limit": 7.0, "alpha": 1.702, "up_offset": 1.0},
    }[activation]
    h_C2F = moe_ops.grouped_mm(rows_CH, w13, offsets_L)
    a_CF = moe_ops.swiglu(h_C2F, row_weights_C, offsets_L, **options)
    return moe_ops.grouped_mm(a_CF, w2, offsets_L)


def _dispatch(inputs: Inputs, run: Run, group: Any) -> tuple[torch.Tensor, torch.Tensor, Any]:
    return moe_ops.dispatch(
        inputs.x_TH,
        inputs.ids_TK,
        inputs.weights_TK,
        num_experts=run.case.num_experts,
        group=group,
        **run.plan_settings(),
    )


def flex(inputs: Inputs, run: Run, group: Any) -> torch.Tensor:
    rows_DH, weights_DK, plan = _dispatch(inputs, run, group)
    maps = plan.slot_of_row_C, plan.row_of_slot_DK
    rows_CH = moe_ops.permute(rows_DH, None, *maps)
    z_CH = experts(rows_CH, inputs.w13, inputs.w2, plan.offsets_L, run.case.activation)
    copies_DH = moe_ops.unpermute(z_CH, weights_DK, *maps)
    return moe_ops.combine(copies_DH, plan, group=group)[0]


def flex_weighted_early(inputs: Inputs, run: Run, group: Any) -> torch.Tensor:
    """Gate weights applied at the activation."""
    rows_DH, weights_DK, plan = _dispatch(inputs, run, group)
    maps = plan.slot_of_row_C, plan.row_of_slot_DK
    slot_weights = weights_DK.reshape(-1, 1)
    row_weights_C = moe_ops.permute(slot_weights, None, maps[0], maps[1].reshape(-1, 1)).flatten()
    rows_CH = moe_ops.permute(rows_DH, None, *maps)
    z_CH = experts(
        rows_CH, inputs.w13, inputs.w2, plan.offsets_L, run.case.activation, row_weights_C
    )
    return moe_ops.combine(moe_ops.unpermute(z_CH, None, *maps), plan, group=group)[0]


def alltoall(inputs: Inputs, run: Run, group: Any) -> torch.Tensor:
    plan = moe_ops.exchange_plan(inputs.ids_TK, run.case.num_experts, group=group)
    *maps, _ = moe_ops.sort_slots(inputs.ids_TK, run.case.num_experts)
    _, _, send, receive = plan.splits_4P
    num_rows = plan.slot_of_row_C.shape[0]
    rows = moe_ops.permute(inputs.x_TH, None, *maps)
    received = moe_ops.all_to_all(rows, send, receive, num_rows, group=group)
    rows_CH = moe_ops.sort_chunks(received, plan.counts_PL)
    z_CH = experts(rows_CH, inputs.w13, inputs.w2, plan.offsets_L, run.case.activation)
    back = moe_ops.sort_chunks(z_CH, plan.counts_PL.T)
    returned = moe_ops.all_to_all(back, receive, send, rows.shape[0], group=group)
    return moe_ops.unpermute(returned, inputs.weights_TK, *maps)


def allgather(inputs: Inputs, run: Run, group: Any) -> torch.Tensor:
    counts_P, rank_of_token_G = moe_ops.gather_plan(inputs.x_TH, group=group)
    total = rank_of_token_G.shape[0]
    x_GH, ids_GK, weights_GK = (
        moe_ops.all_gather_rows(values, counts_P, total, group=group)
        for values in (inputs.x_TH, inputs.ids_TK, inputs.weights_TK)
    )
    experts_here = inputs.w13.shape[0]
    first = (dist.get_rank(group) if group else 0) * experts_here
    *maps, offsets_L = moe_ops.sort_slots(ids_GK - first, experts_here)
    rows_CH = moe_ops.permute(x_GH, None, *maps)
    z_CH = experts(rows_CH, inputs.w13, inputs.w2, offsets_L, run.case.activation)
    partial_GH = moe_ops.unpermute(z_CH, weights_GK, *maps)
    num_tokens = inputs.x_TH.shape[0]
    return moe_ops.reduce_scatter_rows(partial_GH, counts_P, num_tokens, group=group)


CHAINS = {
    "flex": flex,
    "flex_weighted_early": flex_weighted_early,
    "alltoall": alltoall,
    "allgather": allgather,
}


def run_chain(rank: int, run: Run, group: Any) -> list[torch.Tensor]:
    """Output and gradients of `GRADS` on this member for the sum of squares of all outputs."""
    share = run.case.num_experts // len(run.tokens)
    inputs = run.inputs()[rank]
    local = {
        "x_TH": inputs.x_TH,
        "weights_TK": inputs.weights_TK,
        "w13": inputs.w13[rank * share : (rank + 1) * share],
        "w2": inputs.w2[rank * share : (rank + 1) * share],
    }
    leaves = {name: value.clone().requires_grad_() for name, value in local.items()}
    output = CHAINS[run.chain](dataclasses.replace(inputs, **leaves), run, group)
    output.square().sum().backward()
    return [output.detach(), *(leaves[name].grad for name in GRADS)]


def run_on_member(rank: int, run: Run) -> list[torch.Tensor] | None:
    group = group_of(*run.members)
    return run_chain(run.members.index(rank), run, group) if rank in run.members else None


def check_run(run: Run, results: list[list[torch.Tensor]]) -> None:
    """Results of all members against the float64 oracle."""
    all_inputs = run.inputs()
    w13, w2 = (getattr(all_inputs[0], name).double().requires_grad_() for name in ("w13", "w2"))
    oracles = []
    for inputs in all_inputs:
        x, weights = (t.double().requires_grad_() for t in (inputs.x_TH, inputs.weights_TK))
        output = moe_oracle(x, inputs.ids_TK, weights, w13, w2, activation=run.case.activation)
        output.square().sum().backward()
        oracles.append((output, x.grad, weights.grad))
    share = run.case.num_experts // len(results)
    # A chain of roundings: several times what one operator may lose.
    scale = [max(o[i].abs().max().item() if o[i].numel() else 0 for o in oracles) for i in range(3)]
    scale = [4 * value for value in (*scale, w13.grad.abs().max(), w2.grad.abs().max())]
    # float32 weights, but their gradient is made of values in the case's dtype.
    rounding = TOLERANCE[run.case.dtype]
    for rank, (found, oracle) in enumerate(zip(results, oracles)):
        here = slice(rank * share, (rank + 1) * share)
        wanted = [*oracle, w13.grad[here], w2.grad[here]]
        for name, actual, expected, size in zip(("output", *GRADS), found, wanted, scale):
            loss = rounding / TOLERANCE[actual.dtype]
            assert_close(f"rank {rank}: {name}", actual, expected, scale=float(size) * loss)
