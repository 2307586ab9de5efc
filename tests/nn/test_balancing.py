"""Losses against loops over tokens in Python floats; Sinkhorn; capacity; the bias for selection."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_ops.nn import balancing
from moe_ops.nn.config import RouterConfig
from moe_ops.nn.router import Router, update_expert_bias
from moe_ops.ops.topk_route import SCORES
from tests.ranks import run_on_ranks

T, K, E = 12, 2, 4
MASKS = {
    "no_mask": None,
    "padding": [1, 0, 1, 1, 1, 1, 0, 0, 1, 1, 1, 0],
    "empty_sequence": [1, 1, 1, 0, 0, 0, 1, 0, 1, 1, 1, 1],
    "all_padding": [0] * 12,
}


def mask_of(name: str) -> torch.Tensor | None:
    return None if MASKS[name] is None else torch.tensor(MASKS[name], dtype=torch.bool)


def sample(num_tokens: int = T, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 logits, skewed to expert 0, and ids, some of them -1."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_tokens, E, generator=generator, dtype=torch.float64)
    logits[:, 0] += 1
    ids = logits.topk(K).indices.int()
    ids[1::5, 1] = -1
    return logits, ids


def scores_of(logits: list[float], score: str) -> list[float]:
    raw: Callable[[float], float] = {
        "softmax": math.exp,
        "sigmoid": lambda z: 1 / (1 + math.exp(-z)),
        "sqrtsoftplus": lambda z: math.sqrt(math.log1p(math.exp(z))),
    }[score]
    values = [raw(z) for z in logits]
    return [value / sum(values) for value in values]


def loss_by_loop(
    logits: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor | None, score: str
) -> float:
    counts, sums, tokens = [0] * E, [0.0] * E, 0
    for token in range(logits.shape[0]):
        if mask is not None and not mask[token]:
            continue
        tokens += 1
        for expert in ids[token].tolist():
            counts[expert] += expert >= 0
        for expert, value in enumerate(scores_of(logits[token].tolist(), score)):
            sums[expert] += value
    total = sum(c * s for c, s in zip(counts, sums))
    return E / (ids.shape[1] * tokens**2) * total if tokens else 0.0


def seq_loss_by_loop(
    logits: torch.Tensor, ids: torch.Tensor, mask: torch.Tensor | None, score: str, number: int
) -> float:
    masks = [None] * number if mask is None else mask.chunk(number)
    chunks = zip(logits.chunk(number), ids.chunk(number), masks)
    return sum(loss_by_loop(*chunk, score) for chunk in chunks) / number


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("score", SCORES)
def test_aux_loss_matches_reference(score: str, mask: str) -> None:
    logits, ids = sample()
    expected = loss_by_loop(logits, ids, mask_of(mask), score)
    for found in (
        balancing.aux_loss(logits, ids, mask_of(mask), score=score),
        balancing.global_aux_loss(logits, ids, mask_of(mask), group_name="", score=score),
        balancing.seq_aux_loss(logits, ids, mask_of(mask), num_sequences=1, score=score),
    ):
        assert found.item() == pytest.approx(expected, rel=1e-12)
    low = balancing.aux_loss(logits.bfloat16(), ids, mask_of(mask), score=score)
    assert low.dtype == torch.float32
    assert low.item() == pytest.approx(expected, rel=2e-2)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("score", SCORES)
def test_seq_aux_loss_matches_reference(score: str, mask: str) -> None:
    logits, ids = sample()
    found = balancing.seq_aux_loss(logits, ids, mask_of(mask), num_sequences=4, score=score)
    expected = seq_loss_by_loop(logits, ids, mask_of(mask), score, 4)
    assert found.item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("mask", MASKS)
def test_z_loss_matches_reference(mask: str) -> None:
    logits, _ = sample()
    kept = [bool(m) for m in MASKS[mask] or [1] * T]
    squares = [
        math.log(sum(math.exp(z) for z in row)) ** 2
        for row, keep in zip(logits.tolist(), kept)
        if keep
    ]
    expected = sum(squares) / max(len(squares), 1)
    assert balancing.z_loss(logits, mask_of(mask)).item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("score", SCORES)
def test_losses_grad_matches_reference(score: str, mask: str) -> None:
    logits, ids = sample()
    logits.requires_grad_()
    given = (ids, mask_of(mask))
    losses: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda z: balancing.aux_loss(z, *given, score=score),
        lambda z: balancing.seq_aux_loss(z, *given, num_sequences=4, score=score),
        lambda z: balancing.global_aux_loss(z, *given, group_name="", score=score),
        lambda z: balancing.z_loss(z, given[1]),
    ]
    for loss in losses:
        assert torch.autograd.gradcheck(loss, logits)


def test_aux_loss_is_one_for_an_even_load() -> None:
    ids = torch.tensor([[0, 1], [2, 3], [1, 2], [3, 0]])
    assert balancing.aux_loss(torch.zeros(4, E), ids).item() == pytest.approx(1)


def test_aux_loss_example_of_the_module() -> None:
    logits = torch.tensor([[0, 1, 3], [2, 2, 0], [1, 0, 4], [5, 0, 5.0]])
    ids = torch.tensor([[2, 1], [0, 1], [2, 0], [0, 2]])
    assert round(balancing.aux_loss(logits, ids).item(), 2) == 1.07


@pytest.mark.parametrize("score", SCORES)
def test_losses_handle_extreme_logits(score: str) -> None:
    logits = torch.tensor([[0.0, -200, -300, -400], [-500, -500, -500, -500]]).requires_grad_()
    loss = balancing.aux_loss(logits, torch.tensor([[0, 1], [1, 2]]), score=score)
    (loss + balancing.z_loss(logits)).backward()
    assert loss.isfinite()
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize("score", SCORES)
def test_losses_handle_no_tokens(score: str) -> None:
    logits = torch.zeros(0, E, requires_grad=True)
    ids = torch.zeros(0, K, dtype=torch.int32)
    loss = balancing.aux_loss(logits, ids, score=score) + balancing.z_loss(logits)
    for number in (0, 1, 3):
        loss = loss + balancing.seq_aux_loss(logits, ids, num_sequences=number, score=score)
    loss.backward()
    assert loss.item() == 0


@pytest.mark.parametrize("number", [0, -2, 5])
def test_seq_aux_loss_rejects_a_number_that_does_not_divide(number: int) -> None:
    logits, ids = sample()
    with pytest.raises(ValueError, match=r"seq_aux_loss: num_sequences must .* got"):
        balancing.seq_aux_loss(logits, ids, num_sequences=number)


def share_of(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A rank's tokens: 12 or 9, each with padding of its own."""
    logits, ids = sample((T, 9)[rank], seed=rank)
    mask = torch.ones(logits.shape[0], dtype=torch.bool)
    mask[[(1, 6, 7), (0, 2, 3, 4, 8)][rank],] = False
    return logits, ids, mask


def global_aux_on_rank(rank: int, compiled: bool) -> tuple[float, torch.Tensor]:
    logits, ids, mask = share_of(rank)
    before = ids.clone(), mask.clone()

    def loss_of(logits: torch.Tensor) -> torch.Tensor:
        name = dist.group.WORLD.group_name
        return balancing.global_aux_loss(logits, ids, mask, group_name=name)

    if compiled:
        loss_of = torch.compile(loss_of, backend="aot_eager", fullgraph=True)
    loss = loss_of(logits.requires_grad_())
    loss.backward()
    assert torch.equal(ids, before[0])
    assert torch.equal(mask, before[1])
    return loss.item(), logits.grad


@pytest.mark.dist
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_global_aux_loss_is_the_global_batch_s(compiled: bool) -> None:
    """Case 15: other padding on each rank; the averaged gradient is that of the whole batch."""
    values, grads = zip(*run_on_ranks(2, global_aux_on_rank, compiled))
    parts = [share_of(rank) for rank in range(2)]
    logits, ids, mask = (torch.cat(part) for part in zip(*parts))
    expected = loss_by_loop(logits, ids, mask, "softmax")
    assert sum(values) / 2 == pytest.approx(expected, rel=1e-12)
    averaged, step = torch.cat(grads) / 2, 1e-6
    for token in range(logits.shape[0]):
        for expert in range(E):
            moved = [logits.clone(), logits.clone()]
            moved[0][token, expert] += step
            moved[1][token, expert] -= step
            up, down = (loss_by_loop(z, ids, mask, "softmax") for z in moved)
            slope = (up - down) / (2 * step)
            assert averaged[token, expert].item() == pytest.approx(slope, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_sinkhorn_balances_a_skewed_batch(top_k: int, scale: float) -> None:
    logits = scale * (torch.randn(256, 8) + torch.randn(8))
    mask = torch.rand(256) < 0.8

    def fullest(values: torch.Tensor) -> float:
        load = torch.bincount(values[mask].topk(top_k).indices.reshape(-1), minlength=8).float()
        return (load.max() / load.mean()).item()

    plan = balancing.sinkhorn(logits, mask)
    assert fullest(plan) < 1.5
    assert fullest(plan) < 0.6 * fullest(logits)
    torch.testing.assert_close(plan[mask], balancing.sinkhorn(logits[mask]))


def test_sinkhorn_scales_rows_and_columns() -> None:
    plan = balancing.sinkhorn(torch.randn(60, 6, dtype=torch.float64), num_steps=100).exp()
    torch.testing.assert_close(plan.sum(1), torch.ones(60, dtype=torch.float64))
    torch.testing.assert_close(plan.sum(0), torch.full((6,), 10.0, dtype=torch.float64))


@pytest.mark.parametrize("num_tokens", [0, 1, 5])
def test_sinkhorn_handles_no_tokens(num_tokens: int) -> None:
    padding = torch.zeros(num_tokens, dtype=torch.bool)
    logits = torch.randn(num_tokens, E)
    assert balancing.sinkhorn(logits).isfinite().all()
    assert balancing.sinkhorn(logits, padding).isfinite().all()


def drop_by_loop(
    weights: torch.Tensor, ids: torch.Tensor, capacity: int, policy: str
) -> list[tuple[int, int]]:
    """The (token, k) that stay."""
    slots = [(t, k) for t in range(ids.shape[0]) for k in range(ids.shape[1]) if ids[t, k] >= 0]
    if policy == "probs":
        slots.sort(key=lambda slot: -weights[slot].item())
    kept, used = [], [0] * E
    for slot in slots:
        if used[ids[slot]] < capacity:
            used[ids[slot]] += 1
            kept.append(slot)
    return kept


@pytest.mark.parametrize("capacity", [0, 1, 3, 6, T, 3 * T])
@pytest.mark.parametrize("policy", ["probs", "position"])
def test_drop_over_capacity_matches_reference(policy: str, capacity: int) -> None:
    """Case 16, ties included: weights have one decimal."""
    _, ids = sample()
    weights = (torch.rand(T, K) * 5).round() / 5
    found, found_ids, dropped = balancing.drop_over_capacity(
        weights, ids, E, expert_capacity=capacity, policy=policy
    )
    kept = torch.zeros(T, K, dtype=torch.bool)
    for slot in drop_by_loop(weights, ids, capacity, policy):
        kept[slot] = True
    assert torch.equal(found_ids, torch.where(kept, ids, -1))
    assert torch.equal(found, torch.where(kept, weights, 0))
    assert found_ids.dtype == torch.int32
    assert dropped.dtype == torch.int64
    assert dropped.item() == ((ids >= 0) & ~kept).sum().item()


@pytest.mark.parametrize("policy", ["probs", "position"])
def test_drop_over_capacity_handles_no_tokens(policy: str) -> None:
    weights, ids = torch.zeros(0, K), torch.zeros(0, K, dtype=torch.int32)
    found = balancing.drop_over_capacity(weights, ids, E, expert_capacity=0, policy=policy)
    assert [tuple(value.shape) for value in found] == [(0, K), (0, K), ()]
    assert found[2].item() == 0


H = 16


def biased(**config: Any) -> Router:
    return Router(H, E, K, RouterConfig(expert_bias=True, **config))


def test_update_expert_bias_raises_the_underloaded() -> None:
    model = torch.nn.ModuleList([biased(), Router(H, E, K, RouterConfig()), biased()])
    model[0].tokens_per_expert.copy_(torch.tensor([9, 1, 5, 5]))
    model[1].tokens_per_expert.fill_(7)
    update_expert_bias(torch.compile(model))
    rate = model[0].config.bias_update_rate
    assert model[0].expert_bias.tolist() == pytest.approx([-rate, rate, 0, 0])
    assert model[2].expert_bias.tolist() == [0] * E
    assert model[0].tokens_per_expert.sum().item() == 0
    assert model[1].tokens_per_expert.sum().item() == 7 * E


def test_update_expert_bias_evens_the_load() -> None:
    made = biased(score="sigmoid", bias_update_rate=0.01)
    torch.nn.init.normal_(made.weight)
    x = torch.randn(512, H) + made.weight[0].detach() / 4
    load = []
    for _ in range(100):
        made(x)
        load.append(made.stats()["max_load"].item())
        made.update_expert_bias()
    assert load[-1] < 1.2 < 1.5 < load[0]


def test_update_expert_bias_rejects_routers_of_several_groups() -> None:
    model = torch.nn.ModuleList([biased(), biased()])
    model[1].group_name = "other"
    with pytest.raises(ValueError, match=r"update_expert_bias: the routers' groups must .* got"):
        update_expert_bias(model)


def update_on_rank(rank: int) -> tuple[list[list[float]], int]:
    model = torch.nn.ModuleList(
        Router(H, num_experts, K, RouterConfig(expert_bias=True), group=dist.group.WORLD)
        for num_experts in (4, 8)
    )
    for made in model:
        made.tokens_per_expert.copy_(torch.arange(made.num_experts).roll(rank) ** 2)
    calls, all_reduce = [], dist.all_reduce

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return all_reduce(*args, **kwargs)

    dist.all_reduce = counted
    try:
        update_expert_bias(model)
    finally:
        dist.all_reduce = all_reduce
    pickle.loads(pickle.dumps(copy.deepcopy(model)))
    return [made.expert_bias.tolist() for made in model], len(calls)


@pytest.mark.dist
def test_update_expert_bias_reduces_once_over_ranks() -> None:
    results = run_on_ranks(2, update_on_rank)
    assert results[0] == results[1]
    for bias, size in zip(results[0][0], (4, 8)):
        counts = torch.arange(size) ** 2
        counts = counts + counts.roll(1)
        expected = 1e-3 * (counts.float().mean() - counts).sign()
        assert bias == pytest.approx(expected.tolist())
    assert results[0][1] == 1
