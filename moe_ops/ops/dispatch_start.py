"""`dispatch` and `combine` in two halves, so that what does not need their results runs meanwhile.
Private: `fx_passes.split_exchange` makes them.

    rows_DH, weights_DK = dispatch_wait(dispatch_start(...), ...) = dispatch(...)
    x_TH, weights_TK = combine_wait(combine_start(...), ...) = combine(...)

A wait takes its start's tensors again: a compiled graph keeps them, unchanged, until an exchange
that reads them is over. A start says on how many multiprocessors the engine `nvlink` runs it, the
same on all ranks; 0: as `comm.setup` said.

Letters: as in `moe_ops.ops.dispatch`; T tokens here, D copies held here, H hidden, K top-k.

    x_TH = [[1], [2], [3], [4]] and the plan of ids_TK = [[2, 0], [0, 1], [2, -1], [0, 2]], P = 1
    dispatch_start -> ticket_1; dispatch_wait of it -> rows_DH = [[1], [2], [3], [4]]
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from .. import _library, checks, kernels
from ..comm import in_flight, nvlink


def _define_halves(op: str) -> None:
    """`op`_start, with the arguments of `op` and `num_sms`, and `op`_wait, with its tensors and its
    outputs.
    """
    whole = _library.info(op)
    arguments, outputs = whole.schema.removeprefix(op).split(" -> ")
    given = arguments.strip("()").split(", ")
    tensors = [argument for argument in given if argument.startswith("Tensor")]
    not_tensors = [""] * (len(given) - len(tensors))  # they change nothing of the outputs' shapes
    group_at = given.index("str group_name")

    def check_start(*args: Any) -> tuple[object, ...]:
        *of_whole, num_sms = args
        if not 0 <= num_sms <= nvlink.MAX_SMS:
            most = nvlink.MAX_SMS
            raise ValueError(f"{op}_start: num_sms must be from 0 to {most}, got {num_sms}")
        return whole.check(*of_whole), num_sms

    @functools.wraps(whole.reference, assigned=())  # its parameters: `define` looks for the group
    def start(*args: Any) -> torch.Tensor:
        *of_whole, num_sms = args
        like = _library.first_tensor(args)
        run = kernels.choose(op, *of_whole) if like.device.type == "cuda" else whole.reference
        with nvlink.on_sms(of_whole[group_at], num_sms):
            return in_flight.start(lambda: run(*of_whole), like)

    def start_fake(like: torch.Tensor, *rest: Any) -> torch.Tensor:
        return like.new_empty(1, dtype=torch.int64)

    def check_wait(ticket_1: torch.Tensor, like: torch.Tensor, *rest: Any) -> None:
        checks.tensor(f"{op}_wait", "ticket_1", ticket_1, 1, (torch.int64,), like=like)

    def wait(ticket_1: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
        return tuple(in_flight.wait(f"{op}_wait", ticket_1))

    def wait_fake(ticket_1: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
        return whole.fake(*rest, *not_tensors)

    _library.define(
        f"{op}_start{arguments.removesuffix(')')}, int num_sms) -> Tensor ticket_1",
        check=check_start,
        reference=start,
        fake=start_fake,
        private=True,
    )
    _library.define(
        f"{op}_wait(Tensor ticket_1, {', '.join(tensors)}) -> {outputs}",
        check=check_wait,
        reference=wait,
        fake=wait_fake,
        private=True,
    )


_define_halves("dispatch")
_define_halves("combine")
