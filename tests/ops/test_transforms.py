"""vmap, autocast, torch.export and large addresses, for every operator."""

from __future__ import annotations

import io

import pytest
import torch

import moe_ops
from moe_ops.testing import assert_equal

from .checks import overload, values
from .samples import OPS, Sizes, samples

all_ops = pytest.mark.parametrize("op", OPS)


@all_ops
def test_op_rejects_vmap(op: str) -> None:
    first, *rest = samples(op, Sizes(requires_grad=False))[0]
    batch = torch.stack([first, first])
    with pytest.raises(NotImplementedError, match=f"{op}: must not be called under torch.vmap"):
        torch.vmap(lambda sample: overload(op)(sample, *rest))(batch)


@all_ops
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_op_keeps_dtypes_under_autocast(op: str, dtype: torch.dtype) -> None:
    """Only the public functions of the matmul and the bias cast, where nn.Linear would."""
    for arguments in samples(op, Sizes(requires_grad=False, dtype=dtype)):
        expected = torch.utils._pytree.tree_leaves(overload(op)(*arguments))
        with torch.autocast("cpu", torch.bfloat16):
            found = torch.utils._pytree.tree_leaves(overload(op)(*arguments))
        for index, (actual, wanted) in enumerate(zip(found, expected, strict=True)):
            assert_equal(f"{op} output {index}", actual, wanted)


class _Module(torch.nn.Module):
    def __init__(self, op: str) -> None:
        super().__init__()
        self.op = overload(op)

    def forward(self, *arguments):
        return self.op(*arguments)


@all_ops
@pytest.mark.parametrize("strict", [True, False], ids=["strict", "non_strict"])
def test_op_exports(op: str, strict: bool) -> None:
    arguments = samples(op, Sizes(requires_grad=False))[0]
    program = torch.export.export(_Module(op), arguments, strict=strict)
    targets = [node.target for node in program.graph.nodes]
    assert overload(op) in targets
    expected = torch.utils._pytree.tree_leaves(overload(op)(*arguments))
    found = torch.utils._pytree.tree_leaves(program.module()(*arguments))
    for index, (actual, wanted) in enumerate(zip(found, expected, strict=True)):
        assert_equal(f"{op} output {index}", actual, wanted)


class _ThereAndBack(torch.nn.Module):
    def __init__(self, **settings: int) -> None:
        super().__init__()
        self.settings = settings

    def forward(self, x_TH, ids_TK, weights_TK):
        rows_DH, weights_DK, plan = moe_ops.dispatch(
            x_TH, ids_TK, weights_TK, num_experts=4, group=None, **self.settings
        )
        maps = plan.slot_of_row_C, plan.row_of_slot_DK
        rows_CH = moe_ops.permute(rows_DH, None, *maps)
        return moe_ops.combine(moe_ops.unpermute(rows_CH, weights_DK, *maps), plan, group=None)[0]


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "non_strict"])
@pytest.mark.parametrize(
    ("settings", "num_unbacked"),
    [({}, 2), ({"max_tokens": 8, "copy_capacity": 8, "row_capacity": 16}, 0)],
    ids=["exact", "capacity"],
)
def test_ops_export_together(strict: bool, settings: dict[str, int], num_unbacked: int) -> None:
    """Saved, loaded and run with another routing: right values; the sizes are as documented."""
    module = _ThereAndBack(**settings)
    first = values(7, 3), torch.tensor([[0, 1]] * 7), torch.ones(7, 2)
    program = torch.export.export(module, first, strict=strict)
    text = program.graph_module.print_readable(print_output=False)
    assert len({symbol for symbol in ("u0", "u1", "u2") if symbol in text}) == num_unbacked
    saved = io.BytesIO()
    torch.export.save(program, saved)
    saved.seek(0)
    second = values(7, 3, seed=1), torch.tensor([[-1, 3], [2, -1]] + [[-1, -1]] * 5), first[2] * 3
    loaded = torch.export.load(saved).module()
    assert_equal("x_TH", loaded(*second), module(*second))


TOKENS, HIDDEN = 300_000, 7_168  # more values than int32 can number


def sparse_rows(device: str, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """[TOKENS, HIDDEN], of which only the last two rows are ever written: on Linux a CPU tensor
    takes memory only where it was touched, unless the tests fill it with NaN."""
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        rows = torch.empty(TOKENS, HIDDEN, dtype=dtype, device=device)
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = True
    rows[-2:] = torch.arange(2 * HIDDEN, device=device).reshape(2, HIDDEN) % 251
    return rows


def check_last_rows(device: str) -> None:
    x_TH = sparse_rows(device)
    last = x_TH[-2:].clone()
    slots = torch.tensor([TOKENS - 1, -1, TOKENS - 2], dtype=torch.int32, device=device)
    rows_of = torch.full((TOKENS, 1), -1, dtype=torch.int32, device=device)
    rows_of[TOKENS - 1], rows_of[TOKENS - 2] = 0, 2
    rows_CH = moe_ops.permute(x_TH, None, slots, rows_of)
    assert_equal("rows_CH", rows_CH, torch.stack([last[1], last[0] * 0, last[0]]))
    # The other way round: x's rows as the expert-sorted buffer.
    sums_TH = moe_ops.unpermute(x_TH, None, rows_of.flatten(), slots[:, None])
    assert_equal("sums_TH", sums_TH, rows_CH)
    dots_TK = moe_ops.row_dot(x_TH, torch.ones_like(rows_CH), rows_of.flatten(), slots[:, None])
    assert_equal("dots_TK", dots_TK.flatten(), sums_TH.float().sum(1))


def test_ops_address_more_values_than_int32_can_number() -> None:
    check_last_rows("cpu")


@pytest.mark.gpu
def test_ops_address_more_values_than_int32_can_number_on_gpu() -> None:
    check_last_rows("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "top_k"), [(300_000, 1), (38_000, 8)], ids=str)
def test_last_rows_are_right_at_full_size(tokens: int, top_k: int) -> None:
    """There and back with 30 % of the slots dropped: each token times its number of experts."""
    x_TH = torch.randint(-9, 9, (tokens, HIDDEN), device="cuda").bfloat16()
    ids_TK = torch.randint(0, 64, (tokens, top_k), device="cuda")
    ids_TK = torch.where(torch.rand(tokens, top_k, device="cuda") < 0.3, -1, ids_TK)
    *maps, offsets_E = moe_ops.sort_slots(ids_TK, 64)
    rows_CH = moe_ops.permute(x_TH, None, *maps)
    assert not rows_CH[int(offsets_E[-1]) :].count_nonzero()
    sums_TH = moe_ops.unpermute(rows_CH, None, *maps)
    number = (ids_TK >= 0).sum(1, keepdim=True)
    assert_equal("last sums", sums_TH[-1000:], x_TH[-1000:] * number[-1000:].bfloat16())
    assert_equal("first sums", sums_TH[:1000], x_TH[:1000] * number[:1000].bfloat16())
