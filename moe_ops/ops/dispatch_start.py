"""`dispatch` and `combine` in two halves, so that what does not need their results runs meanwhile.
Private: `fx_passes.split_exchange` makes them.

    rows_DH, weights_DK = dispatch_wait(dispatch_start(...), ...) = dispatch(...)
    x_TH, weights_TK = combine_wait(combine_start(...), ...) = combine(...)

A wait takes its start's tensors again: a compiled graph keeps them, unchanged, until an exchange
that reads them is over.

Letters: as in `moe_ops.ops.dispatch`; T tokens here, D copies held here, H hidden, K top-k.

    x_TH = [[1], [2], [3], [4]] and the plan of ids_TK = [[2, 0], [0, 1], [2, -1], [0, 2]], P = 1
    dispatch_start -> ticket_1; dispatch_wait of it -> rows_DH = [[1], [2], [3], [4]]
"""

from __future__ import annotations

import torch

from .. import _library, checks, kernels
from ..comm import in_flight

Tensors = tuple[torch.Tensor, torch.Tensor]

_WHOLE = {op: _library.info(op) for op in ("dispatch", "combine")}


def _check_ticket(op: str, ticket_1: torch.Tensor, like: torch.Tensor) -> None:
    checks.tensor(op, "ticket_1", ticket_1, 1, (torch.int64,), like=like)


def _start(op: str, *args: object) -> torch.Tensor:
    like = _library.first_tensor(args)
    on_gpu = like.device.type == "cuda"
    run = kernels.choose(op, *args) if on_gpu else _WHOLE[op].reference
    return in_flight.start(lambda: run(*args), like)


def _dispatch_start(
    x_TH: torch.Tensor,
    weights_TK: torch.Tensor | None,
    plan: list[torch.Tensor],
    group_name: str,
    wire: str,
) -> torch.Tensor:
    return _start("dispatch", x_TH, weights_TK, plan, group_name, wire)


def _dispatch_start_fake(x_TH: torch.Tensor, *rest: object) -> torch.Tensor:
    return x_TH.new_empty(1, dtype=torch.int64)


def _check_dispatch_wait(
    ticket_1: torch.Tensor,
    x_TH: torch.Tensor,
    weights_TK: torch.Tensor | None,
    plan: list[torch.Tensor],
) -> None:
    _check_ticket("dispatch_wait", ticket_1, x_TH)


def _dispatch_wait(
    ticket_1: torch.Tensor,
    x_TH: torch.Tensor,
    weights_TK: torch.Tensor | None,
    plan: list[torch.Tensor],
) -> Tensors:
    rows_DH, weights_DK = in_flight.wait("dispatch_wait", ticket_1)
    return rows_DH, weights_DK


def _dispatch_wait_fake(
    ticket_1: torch.Tensor,
    x_TH: torch.Tensor,
    weights_TK: torch.Tensor | None,
    plan: list[torch.Tensor],
) -> Tensors:
    return _WHOLE["dispatch"].fake(x_TH, weights_TK, plan, "", "full")


def _combine_start(
    rows_DH: torch.Tensor,
    weights_DK: torch.Tensor | None,
    addend_TH: torch.Tensor | None,
    plan: list[torch.Tensor],
    group_name: str,
) -> torch.Tensor:
    return _start("combine", rows_DH, weights_DK, addend_TH, plan, group_name)


def _combine_start_fake(rows_DH: torch.Tensor, *rest: object) -> torch.Tensor:
    return rows_DH.new_empty(1, dtype=torch.int64)


def _check_combine_wait(
    ticket_1: torch.Tensor,
    rows_DH: torch.Tensor,
    weights_DK: torch.Tensor | None,
    addend_TH: torch.Tensor | None,
    plan: list[torch.Tensor],
) -> None:
    _check_ticket("combine_wait", ticket_1, rows_DH)


def _combine_wait(
    ticket_1: torch.Tensor,
    rows_DH: torch.Tensor,
    weights_DK: torch.Tensor | None,
    addend_TH: torch.Tensor | None,
    plan: list[torch.Tensor],
) -> Tensors:
    x_TH, weights_TK = in_flight.wait("combine_wait", ticket_1)
    return x_TH, weights_TK


def _combine_wait_fake(
    ticket_1: torch.Tensor,
    rows_DH: torch.Tensor,
    weights_DK: torch.Tensor | None,
    addend_TH: torch.Tensor | None,
    plan: list[torch.Tensor],
) -> Tensors:
    return _WHOLE["combine"].fake(rows_DH, weights_DK, addend_TH, plan, "")


_library.define(
    "dispatch_start(Tensor x_TH, Tensor? weights_TK, Tensor[] plan, str group_name, str wire)"
    " -> Tensor ticket_1",
    check=_WHOLE["dispatch"].check,
    reference=_dispatch_start,
    fake=_dispatch_start_fake,
    private=True,
)
_library.define(
    "dispatch_wait(Tensor ticket_1, Tensor x_TH, Tensor? weights_TK, Tensor[] plan)"
    " -> (Tensor rows_DH, Tensor weights_DK)",
    check=_check_dispatch_wait,
    reference=_dispatch_wait,
    fake=_dispatch_wait_fake,
    private=True,
)
_library.define(
    "combine_start(Tensor rows_DH, Tensor? weights_DK, Tensor? addend_TH, Tensor[] plan,"
    " str group_name) -> Tensor ticket_1",
    check=_WHOLE["combine"].check,
    reference=_combine_start,
    fake=_combine_start_fake,
    private=True,
)
_library.define(
    "combine_wait(Tensor ticket_1, Tensor rows_DH, Tensor? weights_DK, Tensor? addend_TH,"
    " Tensor[] plan) -> (Tensor x_TH, Tensor weights_TK)",
    check=_check_combine_wait,
    reference=_combine_wait,
    fake=_combine_wait_fake,
    private=True,
)
