"""The router: gate, choice, losses it returns, counters, bias, capacity, compile."""

from __future__ import annotations

import copy
import fractions
import math
import pickle
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

from moe_ops.nn.config import RouterConfig
from moe_ops.nn.router import Router, Routing

H, E, K = 16, 8, 2
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "softmax_of_chosen": {"score_first": False},
    "bias_groups": {
        "score": "sigmoid",
        "expert_bias": True,
        "scale": 2.5,
        "num_groups": 4,
        "top_groups": 2,
        "group_score_top": 2,
    },
    "losses": {
        "score": "sqrtsoftplus",
        "balancing": ("aux", "seq_aux", "global_aux"),
        "aux_loss_coeff": 1e-2,
        "z_loss_coeff": 1e-3,
    },
    "jitter": {"jitter_eps": 1e-2},
    "sinkhorn": {"balancing": ("sinkhorn",)},
    "capacity_probs": {"expert_capacity_factor": 0.75},
    "capacity_position": {"expert_capacity_factor": 4 / 3, "drop_policy": "position"},
    "capacity_padded": {"expert_capacity_factor": 1, "pad_to_capacity": True},
}
each_option = pytest.mark.parametrize("option", OPTIONS)


def router(option: str = "plain", **changes: Any) -> Router:
    return Router(H, E, K, RouterConfig(**{**OPTIONS[option], **changes}))


def gate_of_logits(num_experts: int = E, top_k: int = K, **config: Any) -> Router:
    """A router whose tokens are their logits."""
    made = Router(num_experts, num_experts, top_k, RouterConfig(**config))
    torch.nn.init.eye_(made.weight)
    return made


def total(routing: Routing) -> torch.Tensor:
    """A scalar with a gradient to everything that has one."""
    return routing.weights_TK.square().sum() + sum(routing.losses.values())


@each_option
@pytest.mark.parametrize("masked", [False, True], ids=["no_mask", "padding"])
def test_router_handles_no_tokens(option: str, masked: bool) -> None:
    made = router(option)
    for num_tokens in (4, 0) if masked else (0,):
        mask = torch.zeros(num_tokens, dtype=torch.bool) if masked else None
        routing = made(torch.randn(num_tokens, H), num_sequences=2, mask_T=mask)
        total(routing).backward()
        assert (routing.ids_TK == -1).all()
        assert total(routing).item() == 0
    assert torch.equal(made.weight.grad, torch.zeros(E, H))
    assert made.stats()["max_load"].item() == 0


@each_option
def test_router_reads_no_device(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made, x = router(option), torch.randn(24, H)
    mask = torch.rand(24) < 0.7

    def forbidden(*args: Any) -> None:
        raise AssertionError("waits for the device")

    for name in ("item", "tolist", "nonzero", "__bool__", "__int__", "__float__", "__index__"):
        monkeypatch.setattr(torch.Tensor, name, forbidden)
    total(made(x, num_sequences=2, mask_T=mask)).backward()
    made.stats()
    made.update_expert_bias()


@each_option
def test_router_compiles_fullgraph(option: str) -> None:
    """Case 23: two graphs over three batch sizes; values, gradients and counters as in eager."""
    torch.compiler.reset()  # its limit counts the graphs of every router in the process
    made = router(option)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(made, backend=counter, fullgraph=True)
    for num_tokens in (16, 24, 32, 24):
        x = torch.randn(num_tokens, H)
        mask = torch.rand(num_tokens) < 0.8
        found = []
        for forward in (compiled, made):
            torch.manual_seed(num_tokens)
            made.zero_grad()
            made.reset_counters()
            routing = forward(x, num_sequences=2, mask_T=mask)
            total(routing).backward()
            values = (routing.weights_TK, routing.losses, made.weight.grad, made.stats())
            found.append((values, routing.ids_TK, routing.expert_capacity, routing.dropped))
        if option != "jitter":  # whose random numbers aot_eager draws in another order
            torch.testing.assert_close(found[0][0], found[1][0])
            assert torch.equal(found[0][1], found[1][1])
        assert found[0][2] == found[1][2]
        assert found[0][0][3]["dropped"] == found[0][3]
    assert counter.frame_count <= 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_router_gate_is_float32(dtype: torch.dtype) -> None:
    made = Router(H, E, K, RouterConfig(balancing=("aux",), aux_loss_coeff=1.0), dtype=dtype)
    x = torch.randn(20, H).to(dtype)
    exact = Router(H, E, K, made.config)
    exact.load_state_dict(made.state_dict())
    expected = exact(x.float())
    with torch.autocast("cpu", torch.bfloat16):
        under_autocast = made(x)
    for routing in (made(x), under_autocast):
        assert torch.equal(routing.weights_TK, expected.weights_TK)
        assert torch.equal(routing.losses["aux"], expected.losses["aux"])
        assert routing.weights_TK.dtype == routing.losses["aux"].dtype == torch.float32
    total(under_autocast).backward()
    total(expected).backward()
    torch.testing.assert_close(made.weight.grad.float(), exact.weight.grad, rtol=1e-2, atol=1e-3)
    assert made(x.double()).weights_TK.dtype == torch.float64


def test_router_grad_matches_reference() -> None:
    made = router("losses").double()
    x = torch.randn(8, H, dtype=torch.float64, requires_grad=True)
    ids = made(x).ids_TK

    def scalar(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        given = {"weight": weight}
        kwargs = {"num_sequences": 2, "ids_TK": ids}
        return total(torch.func.functional_call(made, given, (x,), kwargs))

    assert torch.autograd.gradcheck(scalar, (x, made.weight))


def test_router_handles_one_choice() -> None:
    """Case 10: softmax over the one chosen logit has no gradient; softmax over all has."""
    for score_first in (False, True):
        made = Router(H, E, 1, RouterConfig(score_first=score_first))
        routing = made(torch.randn(6, H))
        routing.weights_TK.sum().backward()
        assert (routing.weights_TK == 1).all() != score_first
        assert (made.weight.grad == 0).all() != score_first


def test_router_handles_weight_that_underflows() -> None:
    """Case 12."""
    routing = gate_of_logits(4)(torch.tensor([[0.0, -200, -300, -400]]))
    assert routing.ids_TK.tolist() == [[0, 1]]
    assert routing.weights_TK.tolist() == [[1, 0]]


@each_option
def test_router_handles_padding(option: str) -> None:
    """Case 13: 3 of 8 tokens are padding; whatever they hold, the others are routed alike."""
    made = router(option, drop_policy="position", jitter_eps=0.0)
    x, mask = torch.randn(8, H), torch.tensor([0, 1, 1, 0, 1, 1, 1, 0], dtype=torch.bool)
    other = torch.where(mask[:, None], x, 100 * torch.randn(8, H))
    routings = [made(tokens, num_sequences=2, mask_T=mask) for tokens in (x, other)]
    torch.testing.assert_close(*[(r.weights_TK, r.ids_TK, r.losses) for r in routings])
    assert (routings[0].ids_TK[~mask] == -1).all()
    assert (routings[0].weights_TK[~mask] == 0).all()
    assert made.tokens_per_expert.sum().item() == 2 * 5 * K
    held = (routings[0].ids_TK >= 0).sum() + routings[0].dropped
    assert held.item() == 5 * K


def test_router_padding_uses_no_capacity() -> None:
    made = gate_of_logits(2, 1, expert_capacity_factor=0.5, drop_policy="position")
    mask = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1], dtype=torch.bool)
    routing = made(torch.tensor([[1.0, 0]] * 8), mask_T=mask)
    assert routing.expert_capacity == 2
    assert routing.ids_TK[:, 0].tolist() == [-1] * 4 + [0, 0, -1, -1]
    assert routing.dropped.item() == 2


def test_router_counts_past_256() -> None:
    """Case 14: counters survive a cast to bf16, and so do small steps of the bias."""
    made = router("bias_groups")
    made.expert_bias.fill_(1.001)
    made.tokens_per_expert.fill_(256)
    made.bfloat16()
    made(torch.randn(4, H))
    assert made.tokens_per_expert.dtype == torch.int64
    assert made.tokens_per_expert.sum().item() == 256 * E + 4 * K
    assert made.expert_bias.dtype == torch.float32
    assert (made.expert_bias == torch.tensor(1.001)).all()
    assert made.eval()(torch.randn(4, H)).losses == {}
    assert made.stats()["tokens_per_expert"].sum().item() == 256 * E + 4 * K


@pytest.mark.parametrize("policy", ["probs", "position"])
def test_router_handles_capacity_over_tokens(policy: str) -> None:
    """Case 16."""
    made = router("capacity_probs", expert_capacity_factor=20.0, drop_policy=policy)
    x = torch.randn(4, H)
    routing = made(x)
    assert routing.expert_capacity == 20
    assert torch.equal(routing.ids_TK, router_without_capacity(made)(x).ids_TK)
    assert routing.dropped.item() == 0


def router_without_capacity(made: Router) -> Router:
    plain = router()
    plain.load_state_dict(made.state_dict())
    return plain


def test_router_drops_before_no_loss_and_renormalises_nothing() -> None:
    made = router("capacity_probs", balancing=("aux",), aux_loss_coeff=1.0)
    plain = router("plain", balancing=("aux",), aux_loss_coeff=1.0)
    plain.load_state_dict(made.state_dict())
    x = torch.randn(32, H)
    routing, whole = made(x), plain(x)
    kept = routing.ids_TK >= 0
    assert 0 < routing.dropped.item() == (~kept).sum().item() == made.stats()["dropped"].item()
    assert torch.equal(routing.weights_TK, torch.where(kept, whole.weights_TK, 0))
    assert torch.equal(routing.losses["aux"], whole.losses["aux"])
    assert torch.equal(made.tokens_per_expert, plain.tokens_per_expert)


@pytest.mark.parametrize("factor", [1, 1.1, 4 / 3, 0.1, 2.5, 1e-9])
def test_router_capacity_is_exact(factor: float) -> None:
    made = Router(H, E, 1, RouterConfig(expert_capacity_factor=factor)).eval()
    exact = fractions.Fraction(4, 3) if factor == 4 / 3 else fractions.Fraction(str(factor))
    for num_tokens in (0, 1, 7, 30, 80, 800):
        expected = math.ceil(num_tokens * exact / E)
        assert made(torch.zeros(num_tokens, H)).expert_capacity == expected
    config = RouterConfig(expert_capacity_factor=factor, pad_to_capacity=True)
    padded = Router(H, E, 1, config, max_tokens=80)
    assert padded(torch.zeros(3, H)).expert_capacity == math.ceil(80 * exact / E)


@each_option
def test_router_replays(option: str) -> None:
    """Case 17, tied logits too: tokens 0 and 1 score all experts alike."""
    made = router(option, jitter_eps=0.0)
    x = torch.randn(16, H)
    x[:2] = 0
    first = made(x, num_sequences=2)
    counted = made.stats()
    again = made(x, num_sequences=2, ids_TK=first.chosen_TK)
    torch.testing.assert_close(made.stats(), counted)
    assert torch.equal(again.chosen_TK, first.chosen_TK)
    assert torch.equal(again.ids_TK, first.ids_TK)
    assert torch.equal(again.dropped, first.dropped)
    assert torch.equal(again.weights_TK, first.weights_TK)
    torch.testing.assert_close(again.losses, first.losses)


def recomputed(made: Router, x: torch.Tensor, reentrant: bool) -> torch.Tensor:
    def body(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        routing = made(x)
        return routing.weights_TK, sum(routing.losses.values(), x.new_zeros(()))

    weights, loss = checkpoint(body, x, use_reentrant=reentrant)
    return weights.square().sum() + loss


@pytest.mark.parametrize("option", ["losses", "jitter", "capacity_probs"])
@pytest.mark.parametrize("how", ["reentrant", "not_reentrant", "compiled"])
def test_router_counts_once_under_checkpoint(how: str, option: str) -> None:
    made = router(option)
    x = torch.randn(16, H, requires_grad=True)
    run = recomputed
    if how == "compiled":
        torch.compiler.reset()
        run = torch.compile(recomputed, backend="aot_eager", fullgraph=True)
    run(made, x, how == "reentrant").backward()
    stats = made.stats()
    assert stats["tokens_per_expert"].sum().item() == 16 * K
    made.reset_counters()
    routing = made(x)
    if option != "jitter":
        torch.testing.assert_close(made.stats(), stats)
        grad = torch.autograd.grad(total(routing), x)[0]
        torch.testing.assert_close(x.grad, grad)


def select_by_loop(keys: list[float], top_k: int, size: int, groups: int, best: int) -> list[int]:
    """Lowest index first among equals, groups and experts alike."""
    starts = range(0, len(keys), size)
    score = {start: sum(sorted(keys[start : start + size])[-best:]) for start in starts}
    chosen = sorted(starts, key=lambda start: -score[start])[:groups]
    eligible = [e for e in range(len(keys)) if e - e % size in chosen]
    return sorted(eligible, key=lambda expert: -keys[expert])[:top_k]


@pytest.mark.parametrize(("groups", "best"), [(1, 2), (2, 1), (3, 2), (4, 2)])
def test_router_selects_from_best_groups(groups: int, best: int) -> None:
    made = gate_of_logits(
        8,
        2,
        score="sigmoid",
        expert_bias=True,
        num_groups=4,
        top_groups=groups,
        group_score_top=best,
    )
    made.expert_bias.copy_(torch.tensor([0, 0, 0.25, 0, 0, 0.5, 0, 0]))
    logits = torch.randint(-1, 2, (200, 8)).float()  # nothing but ties
    keys = (logits.sigmoid() + made.expert_bias).tolist()
    expected = [select_by_loop(row, 2, 2, groups, best) for row in keys]
    assert made(logits).ids_TK.tolist() == expected


def test_router_jitters_in_training_only() -> None:
    """With one expert, one input and weight 1 the z-loss is the noise squared."""
    made = Router(1, 1, 1, RouterConfig(jitter_eps=0.1, z_loss_coeff=1.0))
    torch.nn.init.ones_(made.weight)
    noise = [made(torch.ones(1, 1)).losses["z"].sqrt().item() for _ in range(50)]
    assert 0.9 <= min(noise) < 0.95
    assert 1.05 < max(noise) <= 1.1
    plain, jittered = router(), router("jitter").eval()
    jittered.load_state_dict(plain.state_dict())
    x = torch.randn(6, H)
    assert torch.equal(jittered(x).weights_TK, plain(x).weights_TK)


def test_router_sinkhorn_in_training_only() -> None:
    made, plain = router("sinkhorn"), router()
    plain.load_state_dict(made.state_dict())
    x = torch.randn(64, H) + 3 * made.weight[0] / made.weight[0].norm()
    routing, unbalanced = made(x), plain(x)
    assert made.stats()["max_load"] < plain.stats()["max_load"]
    assert torch.equal(made.eval()(x).ids_TK, unbalanced.ids_TK)
    replayed = plain(x, ids_TK=routing.ids_TK)
    assert torch.equal(replayed.weights_TK, routing.weights_TK)
    assert routing.weights_TK.requires_grad


@each_option
def test_router_is_saved_and_copied(option: str) -> None:
    made = router(option)
    if made.expert_bias is not None:
        made.expert_bias.normal_()
    x = torch.randn(6, H)
    meta = Router(H, E, K, made.config, device="meta")
    assert all(tensor.is_meta for tensor in meta.state_dict().values())
    meta.to_empty(device="cpu").reset_parameters()
    assert meta.weight.std().item() == pytest.approx(0.02, rel=0.3)
    assert meta.stats()["tokens_per_expert"].sum().item() == 0
    meta.load_state_dict(made.state_dict())
    names = {"weight"} if made.expert_bias is None else {"weight", "expert_bias"}
    assert set(made.state_dict()) == names
    for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made)), meta):
        assert torch.equal(other.eval()(x).weights_TK, made.eval()(x).weights_TK)


@pytest.mark.parametrize(
    ("x", "kwargs", "error", "message"),
    [
        (torch.zeros(4, H + 1), {}, ValueError, "Router: x_TH must have H = 16 columns, got 17"),
        (torch.zeros(2, 2, H), {}, ValueError, "Router: x_TH must have 2 dimensions, got shape"),
        (torch.zeros(4, H).int(), {}, TypeError, "Router: x_TH must be .* got torch.int32"),
        (torch.zeros(4, H), {"num_sequences": 3}, ValueError, "num_sequences must divide T = 4"),
        (torch.zeros(4, H), {"mask_T": torch.ones(3) > 0}, ValueError, "mask_T must have T"),
        (torch.zeros(4, H), {"mask_T": torch.ones(4)}, TypeError, "mask_T must be torch.bool"),
        (torch.zeros(4, H), {"ids_TK": torch.zeros(4, 1).int()}, ValueError, "top_k columns"),
    ],
)
def test_router_rejects_bad_input(
    x: torch.Tensor, kwargs: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        router("losses")(x, **kwargs)
