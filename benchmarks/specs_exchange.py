"""What `benchmarks.bench_exchange` times: the processes, a shape's inputs, and the backends.

- stock: `all_to_all_single` of the K copies of every token, sorted and counted beforehand.
- DeepEP: V1, `tokenspeed-deepep`; "dispatch" is on a cached handle and moves no weights.

Letters: T tokens a rank, K top-k, P ranks, H hidden, D copies held here, S = T * K.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from moe_ops import comm, layout
from moe_ops.comm import deep_ep as deep_ep_engine
from moe_ops.comm import nvlink
from moe_ops.ops.dispatch import combine, dispatch
from moe_ops.ops.exchange_plan import exchange_plan

from .harness import reason, relative_error
from .workloads import Scene, Shape

DEEP_EP_SMS = 20
ROUNDS = 5

Result = TypeVar("Result")
Tensors = Sequence[torch.Tensor]


class Ranks:
    """The processes of a run. `group` exchanges on its own backend, `control` on the host."""

    def __init__(self, device: str) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.on_gpu = device == "cuda"
        self.device = f"cuda:{torch.cuda.current_device()}" if self.on_gpu else "cpu"
        self.group = dist.new_group(list(range(self.size)))
        self.control = dist.new_group(list(range(self.size)), backend="gloo")

    def attempt(self, act: Callable[[], Result]) -> tuple[Result | None, str]:
        """What `act` returns, or why it failed on the first rank that it failed on."""
        result, failure = None, ""
        try:
            result = act()
            if self.on_gpu:
                torch.cuda.synchronize()
        except Exception as error:  # noqa: BLE001 - a failure is a row of the table
            failure = reason(error)
        failures: list[Any] = [None] * self.size
        dist.all_gather_object(failures, failure, group=self.control)
        failure = next(filter(None, failures), "")
        return (None if failure else result), failure

    def align(self) -> None:
        dist.barrier(self.group, device_ids=[torch.cuda.current_device()] if self.on_gpu else None)

    def sample(self, run: Callable[[], object], repeats: int) -> list[float]:
        """Microseconds a call, of `repeats` calls back to back."""
        self.align()
        if not self.on_gpu:
            begin = time.perf_counter()
            for _ in range(repeats):
                run()
            return [1e6 * (time.perf_counter() - begin) / repeats]
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(repeats):
            run()
        end.record()
        torch.cuda.synchronize()
        return [1e3 * start.elapsed_time(end) / repeats]

    def most(self, values: Sequence[float]) -> list[float]:
        """The largest of each value over the ranks."""
        found = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.control)
        return found.tolist()

    def interleave(
        self, samplers: Mapping[str, Callable[[], list[float]]]
    ) -> tuple[dict[str, list[list[float]]], dict[str, str]]:
        """Samples of each, one a round after a round that does not count, and the failures."""
        samples: dict[str, list[list[float]]] = {name: [] for name in samplers}
        failures: dict[str, str] = {}
        names = list(samplers)
        for number in range(ROUNDS + 1):
            first = number % max(len(names), 1)
            for name in names[first:] + names[:first]:
                if name in failures:
                    continue
                values, failure = self.attempt(samplers[name])
                if values is None:
                    failures[name] = failure
                elif number:
                    samples[name].append(self.most(values))
        return samples, failures


class Exchange:
    """One shape's inputs on this rank, and what is known of the outputs."""

    def __init__(self, shape: Shape, ranks: Ranks) -> None:
        self.shape = shape
        scene = Scene(shape, "random", ranks.device, seed=ranks.rank)
        self.x_TH, self.ids_TK, self.weights_TK = scene.tokens(), scene.ids_TK, scene.weights_TK
        rows_DH, weights_DK, plan = dispatch(
            self.x_TH,
            self.ids_TK,
            self.weights_TK,
            num_experts=shape.num_experts,
            group=ranks.group,
        )
        copies_sent, copies, self.slots_sent, self.slots = plan.splits_4P.tolist()
        off_rank = sum(copies_sent) - copies_sent[ranks.rank]
        most = ranks.most([sum(copies), sum(self.slots), off_rank])
        self.copy_capacity = capacity(most[0], ranks.size * shape.num_tokens)
        self.row_capacity = capacity(most[1], ranks.size * shape.num_rows)
        self.off_rank_bytes = int(most[2]) * shape.hidden * self.x_TH.element_size()
        self.rows_DH = scene.normal(self.copy_capacity, shape.hidden)
        self.weights_DK = scene.normal(self.copy_capacity, shape.top_k, dtype=torch.float32)

        self.num_copies = sum(copies)
        self.sum_of_copies_H = rows_DH.sum(0, dtype=torch.float64)
        self.sum_of_slots_H = (plan.ids_DK >= 0).sum(1).double() @ rows_DH.double()
        # What was sent to one or two ranks and comes back is exact.
        times_sent_T1 = (plan.copy_of_token_TP >= 0).sum(1, keepdim=True)
        self.returned = (self.x_TH * times_sent_T1.to(self.x_TH.dtype), self.weights_TK)
        found = combine(rows_DH, plan, group=ranks.group, weights_DK=weights_DK)
        if fault := differences(found, self.returned):
            raise WrongResult(f"what comes back is not what was sent: {fault}")

    def plan(self, group: dist.ProcessGroup) -> layout.Plan:
        return exchange_plan(
            self.ids_TK,
            self.shape.num_experts,
            group=group,
            max_tokens=self.shape.num_tokens,
            copy_capacity=self.copy_capacity,
            row_capacity=self.row_capacity,
        )


def capacity(most: float, bound: int) -> int:
    """4 % more than needed, in whole blocks of 128."""
    return min(128 * math.ceil(1.04 * most / 128), bound)


def differences(found: Tensors, expected: Tensors) -> str:
    """Which tensors are not equal bit for bit, "" if all are."""
    wrong = []
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        if one.shape != other.shape or one.dtype != other.dtype:
            wrong.append(f"output {number} is {one.dtype} {list(one.shape)}")
        elif not one.equal(other):
            places = (one != other).nonzero()
            first = tuple(places[0].tolist())
            wrong.append(
                f"output {number} differs in {len(places)} places, first {list(first)}: "
                f"{one[first].item()}, not {other[first].item()}"
            )
    return "; ".join(wrong)


class WrongResult(Exception):
    """A backend's outputs are not what they must be."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """`runs` does each operator; `fault` says what is wrong with an operator's outputs."""

    name: str
    runs: dict[str, Callable[[], Tensors]]
    fault: Callable[[str, Tensors], str]
    detail: str = ""
    ours: bool = True

    def check(self, op: str) -> None:
        if fault := self.fault(op, self.runs[op]()):
            raise WrongResult(fault)


def our_runs(work: Exchange, group: dist.ProcessGroup) -> dict[str, Callable[[], Tensors]]:
    name, x_TH, weights_TK = comm.group_name_of(group), work.x_TH, work.weights_TK
    elsewhere_DH, weights_DK = work.rows_DH, work.weights_DK
    plan = work.plan(group).tensors()
    rows_DH = in_window(elsewhere_DH, name)
    ops = torch.ops.moe_ops

    def plan_and_dispatch() -> Tensors:
        fresh = work.plan(group).tensors()
        return [*ops.dispatch(x_TH, weights_TK, fresh, name, "full"), *fresh[:-1]]

    return {
        "exchange_plan": lambda: work.plan(group).tensors()[:-1],  # splits_4P: an engine's affair
        "dispatch": lambda: ops.dispatch(x_TH, weights_TK, plan, name, "full"),
        "dispatch, fp8": lambda: ops.dispatch(x_TH, weights_TK, plan, name, "fp8"),
        "plan + dispatch": plan_and_dispatch,
        "combine": lambda: ops.combine(rows_DH, None, None, plan, name),
        "combine, weights": lambda: ops.combine(rows_DH, weights_DK, None, plan, name),
        "combine, addend": lambda: ops.combine(rows_DH, None, x_TH, plan, name),
        "combine, rows elsewhere": lambda: ops.combine(elsewhere_DH, None, None, plan, name),
    }


def in_window(rows_DH: torch.Tensor, group_name: str) -> torch.Tensor:
    """Rows where peers can read them, as compiled layers place what they send back."""
    space = nvlink.workspace(group_name)
    place = space.window.empty(tuple(rows_DH.shape), rows_DH.dtype) if space else None
    return rows_DH if place is None else place.copy_(rows_DH)


def captured(run: Callable[[], Tensors]) -> Callable[[], Tensors]:
    """`run` as the replay of a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # NCCL's own thread may ask for events meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        outputs = run()

    def replay() -> Tensors:
        graph.replay()
        return outputs

    return replay


def nvlink_group(work: Exchange, ranks: Ranks, num_sms: int) -> dist.ProcessGroup:
    group = dist.new_group(list(range(ranks.size)))
    comm.setup(
        group,
        engine="nvlink",
        max_tokens=work.shape.num_tokens,
        hidden_size=work.shape.hidden,
        dtype=work.x_TH.dtype,
        num_sms=num_sms,
        timeout_s=60,
    )
    return group


def stock(work: Exchange, ranks: Ranks) -> Candidate:
    order_S = work.ids_TK.reshape(-1).sort(stable=True).indices
    sent_SH = work.x_TH[order_S // work.shape.top_k]
    received = sent_SH.new_empty(sum(work.slots), work.shape.hidden)
    returned_SH = torch.empty_like(sent_SH)

    def there() -> Tensors:
        dist.all_to_all_single(received, sent_SH, work.slots, work.slots_sent, group=ranks.group)
        return (received,)

    def back() -> Tensors:
        dist.all_to_all_single(
            returned_SH, received, work.slots_sent, work.slots, group=ranks.group
        )
        return (returned_SH,)

    def fault(op: str, outputs: Tensors) -> str:
        if op == "combine":
            return differences(outputs, (sent_SH,))
        return sum_fault(outputs[0], sum(work.slots), work.sum_of_slots_H)

    runs = {"dispatch": there, "combine": back}
    return Candidate("stock", runs, fault, "all-to-all of K copies", ours=False)


def sum_fault(rows: torch.Tensor, num_rows: int, sum_H: torch.Tensor) -> str:
    if len(rows) != num_rows:
        return f"{len(rows)} rows, not {num_rows}"
    error = relative_error(rows.sum(0, dtype=torch.float64), sum_H)
    return "" if error < 1e-9 else f"the sum over rows is off by {error:.1e}"


def deep_ep_buffer(ranks: Ranks, hidden: int) -> Any:
    """A buffer of DeepEP V1 for rows of up to `hidden` bf16 values."""
    buffer = deep_ep_engine.load().Buffer
    buffer.set_num_sms(DEEP_EP_SMS)
    configs = (buffer.get_dispatch_config(ranks.size), buffer.get_combine_config(ranks.size))
    sizes = [config.get_nvl_buffer_size_hint(2 * hidden, ranks.size) for config in configs]
    return buffer(ranks.group, max(sizes), 0)


def deep_ep_version() -> str:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("tokenspeed-deepep")
    return "not installed"


def deep_ep(work: Exchange, buffer: Any) -> Candidate:
    x_TH, ids_TK, weights_TK = work.x_TH, work.ids_TK.long(), work.weights_TK

    def plan_and_dispatch() -> tuple[Any, ...]:
        per_rank, _, per_expert, sent_TP, _ = buffer.get_dispatch_layout(
            ids_TK, work.shape.num_experts
        )
        return buffer.dispatch(
            x_TH,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=sent_TP,
            num_tokens_per_expert=per_expert,
            topk_idx=ids_TK,
            topk_weights=weights_TK,
        )

    rows_DH, _, weights_DK, _, handle, _ = plan_and_dispatch()

    def fault(op: str, outputs: Tensors) -> str:
        if op.startswith("combine"):
            return differences(outputs, work.returned[: len(outputs)])
        return sum_fault(outputs[0], work.num_copies, work.sum_of_copies_H)

    runs = {
        "dispatch": lambda: buffer.dispatch(x_TH, handle=handle)[:1],
        "plan + dispatch": lambda: plan_and_dispatch()[:1],
        "combine": lambda: buffer.combine(rows_DH, handle)[:1],
        "combine, weights": lambda: buffer.combine(rows_DH, handle, topk_weights=weights_DK)[:2],
    }
    return Candidate("DeepEP", runs, fault, f"{DEEP_EP_SMS} SMs", ours=False)
