"""topk_route against a loop over tokens, all scores and options."""

from __future__ import annotations

import itertools

import pytest
import torch

import moe_ops
from moe_ops.testing import assert_close, assert_equal

from .checks import DTYPES, check_compiled, check_double_backward_raises, check_rejects, values

OPTIONS = [
    {"score": score, "score_first": first, "normalize": normalize, "scale": scale}
    for (score, first), normalize, scale in itertools.product(
        [("softmax", True), ("softmax", False), ("sigmoid", True), ("sqrtsoftplus", True)],
        [True, False],
        [1.0, 2.5],
    )
]
all_options = pytest.mark.parametrize(
    "options", OPTIONS, ids=lambda o: "-".join(str(value) for value in o.values())
)
NUM_EXPERTS = 6


def weights_loop(logits_TE, ids_TK, score, score_first, normalize, scale):
    """Weights of given choices, one token after another, in the dtype of the logits."""
    rows = []
    for logits_E, ids in zip(logits_TE, ids_TK.tolist()):
        held = [expert for expert in ids if expert >= 0]
        if score == "softmax" and score_first:
            scores = logits_E.softmax(0)[held]
        elif score == "softmax":
            scores = logits_E[held].softmax(0)
        elif score == "sigmoid":
            scores = logits_E[held].sigmoid()
        else:
            scores = torch.nn.functional.softplus(logits_E[held]).sqrt()
        if normalize and len(ids) > 1:
            scores = scores / (scores.sum() + 1e-20)
        places = iter(scores * scale)
        rows.append([next(places) if expert >= 0 else logits_E.sum() * 0 for expert in ids])
    return torch.stack([torch.stack(row) for row in rows])


def ids_loop(keys_TE, top_k):
    """The largest keys, the lowest index first among equals."""
    ids = [
        sorted(range(len(keys_E)), key=lambda expert: (-keys_E[expert], expert))[:top_k]
        for keys_E in keys_TE.tolist()
    ]
    return torch.tensor(ids, dtype=torch.int32).reshape(-1, top_k)


@all_options
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("top_k", [1, 2, 6])
def test_topk_route_matches_reference(options, dtype: torch.dtype, top_k: int) -> None:
    logits_TE = values(9, NUM_EXPERTS, dtype=dtype).requires_grad_()
    weights_TK, ids_TK = moe_ops.topk_route(logits_TE, top_k=top_k, **options)
    assert_equal("ids_TK", ids_TK, ids_loop(logits_TE, top_k))
    assert weights_TK.dtype == torch.promote_types(dtype, torch.float32)
    logits_f64 = logits_TE.detach().double().requires_grad_()
    expected = weights_loop(logits_f64, ids_TK, **options)
    assert_close("weights_TK", weights_TK, expected)
    grad_TK = values(9, top_k, dtype=weights_TK.dtype, seed=1)
    weights_TK.backward(grad_TK)
    expected.backward(grad_TK.double())
    assert logits_TE.grad.dtype == dtype
    assert_close("grad of logits_TE", logits_TE.grad, logits_f64.grad, scale=options["scale"])


@all_options
@pytest.mark.parametrize("grad_layout", ["expanded", "transposed"])
def test_topk_route_grad_matches_reference(options, grad_layout: str) -> None:
    """Given ids with -1 and a token without any; gradients of stride 0 and transposed ones."""
    logits_TE = values(3, NUM_EXPERTS).requires_grad_()
    ids_TK = torch.tensor([[3, -1], [-1, -1], [0, 5]], dtype=torch.int32)
    weights_TK, replayed_TK = moe_ops.topk_route(logits_TE, ids_TK=ids_TK, top_k=2, **options)
    assert_equal("ids_TK", replayed_TK, ids_TK)
    grad_TK = {
        "expanded": torch.ones(()).expand(3, 2),
        "transposed": values(2, 3, seed=1).T,
    }[grad_layout]
    weights_TK.backward(grad_TK)
    logits_f64 = logits_TE.detach().double().requires_grad_()
    expected = weights_loop(logits_f64, ids_TK, **options)
    expected.backward(grad_TK.double())
    assert_close("weights_TK", weights_TK, expected)
    assert_close("grad of logits_TE", logits_TE.grad, logits_f64.grad, scale=options["scale"])
    assert not weights_TK[ids_TK < 0].count_nonzero()


@all_options
def test_topk_route_grad_matches_reference_once(options) -> None:
    check_double_backward_raises(
        "topk_route",
        lambda logits: moe_ops.topk_route(logits, top_k=2, **options)[0],
        values(3, 4),
    )


@all_options
def test_topk_route_compiles_fullgraph(options) -> None:
    logits_TE = values(7, NUM_EXPERTS).requires_grad_()
    check_compiled(lambda logits: moe_ops.topk_route(logits, top_k=2, **options), logits_TE)


def test_topk_route_worked_example() -> None:
    logits_TE = torch.tensor([[0.0, 1, 3], [2, 2, 0], [1, 0, 4], [5, 0, 5]])
    weights_TK, ids_TK = moe_ops.topk_route(logits_TE, top_k=2)
    assert ids_TK.tolist() == [[2, 1], [0, 1], [2, 0], [0, 2]]
    expected = [[0.881, 0.119], [0.5, 0.5], [0.953, 0.047], [0.5, 0.5]]
    assert_close("weights_TK", weights_TK, torch.tensor(expected).double(), scale=50)


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_topk_route_handles_bias(score: str) -> None:
    """The bias moves the choice, never a weight or a gradient."""
    logits_TE, bias_E = values(9, NUM_EXPERTS), values(NUM_EXPERTS, seed=1)
    weights_TK, ids_TK = moe_ops.topk_route(logits_TE, bias_E, top_k=2, score=score)
    scores = {
        "softmax": logits_TE.softmax(1),
        "sigmoid": logits_TE.sigmoid(),
        "sqrtsoftplus": torch.nn.functional.softplus(logits_TE).sqrt(),
    }[score]
    assert_equal("ids_TK", ids_TK, ids_loop(scores + bias_E, 2))
    replayed_TK, _ = moe_ops.topk_route(logits_TE, ids_TK=ids_TK, top_k=2, score=score)
    assert_equal("weights_TK", weights_TK, replayed_TK)


@pytest.mark.parametrize("group_score_top", [0, 1, 2])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_topk_route_handles_groups(score: str, group_score_top: int) -> None:
    """Choices come from the best two of four groups of three."""
    logits_TE, bias_E = values(20, 12), values(12, seed=1)
    _, ids_TK = moe_ops.topk_route(
        logits_TE,
        bias_E,
        top_k=4,
        score=score,
        num_groups=4,
        top_groups=2,
        group_score_top=group_score_top,
    )
    keys_TE = (logits_TE.softmax(1) if score == "softmax" else logits_TE.sigmoid()) + bias_E
    best = group_score_top or 2
    group_scores = keys_TE.reshape(20, 4, 3).sort(-1, descending=True).values[..., :best].sum(-1)
    groups = ids_loop(group_scores, 2)
    for token in range(20):
        eligible = [e for e in range(12) if e // 3 in groups[token].tolist()]
        keys_E = torch.full((12,), -torch.inf)
        keys_E[eligible] = keys_TE[token][eligible]
        assert ids_TK[token].tolist() == ids_loop(keys_E[None], 4)[0].tolist()


def test_topk_route_handles_masked_logits_in_an_eligible_group() -> None:
    """-inf in the chosen group still comes before the experts of other groups."""
    logits_TE = torch.tensor([[5.0, -torch.inf, 4.0, 3.0]])
    groups = {"num_groups": 2, "top_groups": 1, "group_score_top": 1}
    _, ids_TK = moe_ops.topk_route(logits_TE, top_k=2, **groups)
    assert ids_TK.tolist() == [[0, 1]]


def test_topk_route_handles_ties() -> None:
    _, ids_TK = moe_ops.topk_route(torch.zeros(3, 5), top_k=3)
    assert ids_TK.tolist() == [[0, 1, 2]] * 3


def test_topk_route_handles_mask() -> None:
    logits_TE = values(8, 4).requires_grad_()
    mask_T = torch.tensor([1, 1, 0, 1, 0, 1, 1, 0], dtype=torch.bool)
    weights_TK, ids_TK = moe_ops.topk_route(logits_TE, mask_T=mask_T, top_k=2)
    assert (ids_TK[~mask_T] == -1).all()
    assert not weights_TK[~mask_T].count_nonzero()
    weights_TK.square().sum().backward()
    assert not logits_TE.grad[~mask_T].count_nonzero()
    kept, _ = moe_ops.topk_route(logits_TE[mask_T], top_k=2)
    assert_equal("weights_TK", weights_TK[mask_T], kept)


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrtsoftplus"])
@pytest.mark.parametrize("normalize", [False, True])
def test_topk_route_handles_weight_that_underflows(score: str, normalize: bool) -> None:
    """A chosen expert stays chosen with a weight of 0; its gradient is 0, not NaN."""
    logits_TE = torch.tensor([[0.0, -200, -300, -400], [-900, -200, -300, -400]])
    logits_TE.requires_grad_()
    weights_TK, ids_TK = moe_ops.topk_route(logits_TE, top_k=2, score=score, normalize=normalize)
    assert ids_TK.tolist() == [[0, 1], [1, 2]]
    assert weights_TK.isfinite().all()
    weights_TK[:, 0].sum().backward()
    assert logits_TE.grad.isfinite().all()


def test_topk_route_handles_one_choice() -> None:
    """Softmax over the one chosen: weight 1, gradient exactly 0; softmax first learns."""
    logits_TE = values(5, 4).requires_grad_()
    weights_TK, _ = moe_ops.topk_route(logits_TE, top_k=1, score_first=False)
    assert_equal("weights_TK", weights_TK, torch.ones(5, 1))
    (grad,) = torch.autograd.grad(weights_TK.sum(), logits_TE)
    assert_equal("grad", grad, torch.zeros(5, 4))
    weights_TK, _ = moe_ops.topk_route(logits_TE, top_k=1)
    (grad,) = torch.autograd.grad(weights_TK.sum(), logits_TE)
    assert grad.count_nonzero() == 20


def test_topk_route_handles_repeated_ids() -> None:
    logits_TE = values(1, 4, dtype=torch.float64).requires_grad_()
    ids_TK = torch.tensor([[3, 3]])
    weights_TK, _ = moe_ops.topk_route(logits_TE, ids_TK=ids_TK, top_k=2, normalize=False)
    weights_TK.sum().backward()
    logits_f64 = logits_TE.detach().clone().requires_grad_()
    (2 * logits_f64.softmax(1)[0, 3]).backward()
    assert_close("grad", logits_TE.grad, logits_f64.grad)


@pytest.mark.parametrize(
    "options",
    [{}, {"ids_TK": torch.zeros(0, 2, dtype=torch.int64)}, {"num_groups": 2}],
    ids=["plain", "replayed", "groups"],
)
def test_topk_route_handles_no_tokens(options) -> None:
    logits_TE = torch.zeros(0, 4, requires_grad=True)
    weights_TK, ids_TK = moe_ops.topk_route(logits_TE, top_k=2, **options)
    assert weights_TK.shape == ids_TK.shape == (0, 2)
    weights_TK.sum().backward()
    assert logits_TE.grad.shape == (0, 4)


def test_topk_route_handles_transposed_logits() -> None:
    logits_TE = values(6, 9).T
    results = [moe_ops.topk_route(x, top_k=2) for x in (logits_TE, logits_TE.contiguous())]
    for name, found, wanted in zip(("weights_TK", "ids_TK"), *results):
        assert_equal(name, found, wanted)
        assert found.is_contiguous()


def test_topk_route_rejects_replayed_id_out_of_range() -> None:
    for outside in (-2, 4):
        with pytest.raises(RuntimeError, match=r"topk_route: ids_TK must be in -1 \.\. E-1 = 3"):
            moe_ops.topk_route(values(1, 4), ids_TK=torch.tensor([[0, outside]]), top_k=2)


GOOD = {"logits_TE": torch.ones(3, 4), "top_k": 2}
IDS = torch.zeros(3, 2, dtype=torch.int32)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"logits_TE": torch.ones(3, 4).int()}, TypeError, "logits_TE must be .*, got torch.int32"),
        ({"logits_TE": torch.ones(4)}, ValueError, "logits_TE must have 2 dimensions, got shape"),
        ({"top_k": 5}, ValueError, "top_k must be in 1 .. E = 4, got 5"),
        ({"top_k": 0}, ValueError, "top_k must be in 1 .. E = 4, got 0"),
        ({"bias_E": torch.ones(3)}, ValueError, "bias_E must have one value an expert, got 3"),
        ({"bias_E": torch.ones(4).int()}, TypeError, "bias_E must be .*, got torch.int32"),
        ({"ids_TK": IDS.float()}, TypeError, "ids_TK must be .*, got torch.float32"),
        ({"ids_TK": IDS[:2]}, ValueError, "ids_TK must have T rows, got 2 and 3"),
        ({"ids_TK": IDS[:, :1]}, ValueError, "ids_TK must have top_k columns, got 1 and 2"),
        ({"mask_T": torch.ones(3)}, TypeError, "mask_T must be torch.bool, got torch.float32"),
        ({"mask_T": torch.ones(2).bool()}, ValueError, "mask_T must have T values, got 2 and 3"),
        ({"score": "tanh"}, ValueError, "score must be one of .*, got 'tanh'"),
        ({"num_groups": 3}, ValueError, "num_groups must divide E = 4 .*, got num_groups 3"),
        ({"num_groups": 0}, ValueError, "num_groups must be positive, got 0"),
        ({"num_groups": 2, "top_groups": 3}, ValueError, "got num_groups 2 and top_groups 3"),
        ({"num_groups": 4}, ValueError, "top_k must fit into the 1 experts of top_groups, got 2"),
        ({"group_score_top": 5}, ValueError, "group_score_top must be in 0 .. 4, got 5"),
    ],
)
def test_topk_route_rejects_bad_input(changes, error, message) -> None:
    check_rejects("topk_route", moe_ops.topk_route, GOOD, changes, error, message)
