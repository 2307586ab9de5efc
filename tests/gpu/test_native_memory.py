"""What the native grouped matmuls read and write, and when: guarded buffers, the same bits in every
run, no waiting for the device, CUDA graphs, compute-sanitizer.

tests/gpu/test_native_kernels.py has their values.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils import _pytree as pytree

import fx_passes
from csrc import build
from moe_ops import kernels
from moe_ops.comm import in_flight
from moe_ops.nn import MoE, MoEConfig
from moe_ops.testing import assert_close, assert_equal
from tests.gpu import captured, native_calls
from tests.gpu.native_calls import (
    CALLS,
    DEVICE,
    DTYPES,
    NATIVE,
    Sizes,
    all_calls,
    argument,
    is_native,
    launch,
    offsets_of,
    run,
    skip_without_native,
    values,
)

pytestmark = pytest.mark.gpu

ROUTINGS = {
    "full": ([1, 127, 128, 129], 0),
    "sparse": ([1, 3, 200, 0], 308),
    "one row": ([0, 1, 0], 3),
    "no rows": ([0, 0], 5),
    "small": ([7 * expert % 10 for expert in range(50)], 70),
}
GUARD = 130  # rows before and after: more than a tile has
CANARY = 7.0


@pytest.fixture(autouse=True)
def _native() -> None:
    skip_without_native()


class Outputs:
    """Makes outputs of NaN amid canaries."""

    def __init__(self) -> None:
        self.buffers: list[torch.Tensor] = []

    def __call__(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        guard = GUARD if len(shape) < 3 else 1
        buffer = torch.full((shape[0] + 2 * guard, *shape[1:]), CANARY, dtype=dtype, device=DEVICE)
        self.buffers.append(buffer)
        return buffer[guard : guard + shape[0]].fill_(torch.nan)

    def check(self) -> None:
        for buffer in self.buffers:
            guard = GUARD if buffer.dim() < 3 else 1
            for name, rows in (("before", buffer[:guard]), ("after", buffer[-guard:])):
                assert_equal(f"rows {name} an output", rows, torch.full_like(rows, CANARY))


def guarded(tensor: torch.Tensor) -> torch.Tensor:
    """The same amid NaN, or ones if it holds integers."""
    if tensor.dim() == 3 and not tensor.is_contiguous():
        return guarded(tensor.mT).mT
    filler = torch.nan if tensor.is_floating_point() else 1
    guard = GUARD if tensor.dim() < 3 else 1
    buffer = tensor.new_full((len(tensor) + 2 * guard, *tensor.shape[1:]), filler)
    return buffer[guard : guard + len(tensor)].copy_(tensor)


def num_pairs(op: str, args: tuple[Any, ...]) -> int:
    """Pairs of tiles of 128 x 256 (gated: 128 columns of each half) that clusters draw."""
    if "gather" in op:
        return 0
    offsets_L = argument(op, "offsets_L", args)
    if "wgrad" in op:
        heights, width = [args[0].shape[1]] * len(offsets_L), args[1].shape[1]
    else:
        ends_L = offsets_L.clamp(max=args[0].shape[0])
        heights = ends_L.diff(prepend=ends_L.new_zeros(1)).tolist()
        width = next(arg for arg in args if isinstance(arg, torch.Tensor) and arg.dim() == 3).shape[
            1
        ]
    wide = -(-width // 256)
    tall = [-(-height // 128) for height in heights]
    return sum(m // 2 * wide + m % 2 * -(-wide // 2) for m in tall)


def check_launch(op: str, args: tuple[Any, ...], expected: list[torch.Tensor]) -> None:
    """The bare call gives these bits, writes nothing else, and leaves its inputs alone; also where
    its clusters draw their tiles.
    """
    outputs, inputs = Outputs(), pytree.tree_map_only(torch.Tensor, guarded, args)
    for tickets in (None, torch.zeros(1, dtype=torch.int32, device=DEVICE)):
        found = launch(outputs, op, *inputs, tickets=tickets)
        outputs.check()
        for index, (value, wanted) in enumerate(zip(found, expected, strict=True)):
            assert_equal(f"output {index}", value, wanted)
    assert tickets is not None and tickets.item() == num_pairs(op, args)
    for index, (value, wanted) in enumerate(zip(inputs, args, strict=True)):
        if isinstance(wanted, torch.Tensor):
            assert_equal(f"input {index}", value, wanted)


@all_calls
@DTYPES
@pytest.mark.parametrize("routing", ROUTINGS)
def test_native_launch_stays_within_bounds(routing: str, dtype: torch.dtype, call: str) -> None:
    counts, tail = ROUTINGS[routing]
    for width_o, width_i in ((136, 72), (512, 136), (776, 8)):
        sizes = Sizes(counts=counts, tail=tail, width_o=width_o, width_i=width_i, dtype=dtype)
        op, args = CALLS[call].op, CALLS[call].arguments(sizes)
        assert is_native(op, *args)
        check_launch(op, args, run(op, *args))


@all_calls
@pytest.mark.parametrize("ends", [[100, 150, 211], [100, 400, 900]], ids=str)
def test_native_launch_cuts_offsets_at_the_last_row(ends: list[int], call: str) -> None:
    """One row over the buffer, and many."""
    op = CALLS[call].op
    args = CALLS[call].arguments(Sizes(counts=[100, 50, 60], tail=0, width_o=264))
    offsets_L = argument(op, "offsets_L", args)
    ends_L = torch.tensor(ends, dtype=torch.int32, device=DEVICE)
    offsets_L.copy_(ends_L.clamp(max=210))
    expected = run(op, *args)
    offsets_L.copy_(ends_L)
    check_launch(op, args, expected)


@DTYPES
@pytest.mark.parametrize("counts", [[0, 17, 0, 5], [1, 127, 128, 129]], ids=str)
def test_native_wgrad_adds_in_float32(counts: list[int], dtype: torch.dtype) -> None:
    sizes = Sizes(counts=counts, width_o=264, width_i=136, dtype=dtype)
    args = CALLS["wgrad_f32"].arguments(sizes)
    (wgrad_LOI,) = run("grouped_mm_wgrad_f32", *args)
    outputs = Outputs()
    total_LOI = outputs(tuple(wgrad_LOI.shape), torch.float32)
    total_LOI.copy_(values(*wgrad_LOI.shape, dtype=torch.float32, seed=9))
    expected = total_LOI.clone()
    for step in range(3):
        torch.ops.moe_ops_native.grouped_mm_wgrad(*args, None, total_LOI, True)
        expected = expected + wgrad_LOI
        assert_equal(f"sum after step {step}", total_LOI, expected)
    outputs.check()


@all_calls
@DTYPES
def test_native_gives_the_same_bits_in_every_run(dtype: torch.dtype, call: str) -> None:
    """50 of them, half as if beside an exchange, with a matmul on another stream that takes
    multiprocessors away.
    """
    sizes = Sizes(counts=[1300, 0, 77, 1, 2500, 640], width_o=776, width_i=1416, dtype=dtype)
    op, args = CALLS[call].op, CALLS[call].arguments(sizes)
    assert is_native(op, *args)
    first = run(op, *args)
    noise, aside = values(2048, 2048, dtype=dtype, seed=9), torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    for number in range(50):
        if number % 2:
            with torch.cuda.stream(aside):
                noise @ noise
        with mock.patch.object(in_flight, "runs_beside", lambda device, odd=number % 2: odd):
            outputs = run(op, *args)
        for index, (found, expected) in enumerate(zip(outputs, first, strict=True)):
            assert_equal(f"output {index} of run {number}", found, expected)
    aside.synchronize()


@DTYPES
def test_native_never_waits_and_replays_with_other_routings(dtype: torch.dtype) -> None:
    sizes = Sizes(counts=[100, 0, 429, 1, 0, 70, 400, 0], tail=0, width_o=264, dtype=dtype)
    calls = [(call.op, call.arguments(sizes)) for call in CALLS.values()]
    assert all(is_native(op, *args) for op, args in calls)

    def step() -> list[torch.Tensor]:
        return [output for op, args in calls for output in run(op, *args)]

    outputs, replay = captured(step)
    for counts in ([0, 0, 0, 1000, 0, 0, 0, 0], [0] * 8, [3, 129, 0, 1, 300, 0, 0, 67]):
        for op, args in calls:
            argument(op, "offsets_L", args).copy_(offsets_of(counts))
            if op.startswith("gather"):
                slots = argument(op, "slot_of_row_C", args)
                slots.copy_(slots.roll(11) if sum(counts) else torch.full_like(slots, -1))
        replay()
        for index, (found, expected) in enumerate(zip(outputs, step(), strict=True)):
            assert_equal(f"output {index} with {counts}", found, expected)
            if expected.shape[:1] == (sizes.num_rows,):
                assert not found[sum(counts) :].count_nonzero()


# The layer.

LAYER = {"hidden_size": 256, "ffn_hidden_size": 136, "num_experts": 8, "top_k": 4}
CAPACITY = {"size_mode": "capacity", "max_tokens": 256, "row_capacity": 1024}
LAYER_OPS = {
    "grouped_mm_swiglu",
    "grouped_mm",
    "grouped_mm_swiglu_backward",
    "grouped_mm_wgrad",
}


def make_layer(dtype: torch.dtype) -> MoE:
    torch.manual_seed(0)
    return MoE(MoEConfig(**LAYER, **CAPACITY), dtype=dtype, device=DEVICE)


def layer_step(
    layer: MoE, function: Any, x: torch.Tensor, grad: torch.Tensor, ids: torch.Tensor
) -> list[torch.Tensor]:
    """Output and all gradients."""
    y = function(x, router_ids=ids)
    return [y.detach(), *torch.autograd.grad(y, [x, *layer.parameters()], grad)]


def test_compiled_layer_replays_with_other_routings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward, from a CUDA graph: the bits of the compiled layer without one, and the
    values of the eager one.
    """
    ran, choose = set(), kernels.choose

    def noting(op: str, *args: Any) -> Any:
        ran.add((op, kernels.name_of(op, *args)))
        return choose(op, *args)

    monkeypatch.setattr(kernels, "choose", noting)
    layer, exact = make_layer(torch.bfloat16), make_layer(torch.float64)
    exact.load_state_dict(layer.state_dict())
    torch._dynamo.reset()
    function = torch.compile(layer, fullgraph=True, options=fx_passes.options())
    x = values(200, 256, dtype=torch.bfloat16, seed=1).requires_grad_()
    grad = values(200, 256, dtype=torch.bfloat16, seed=2)
    exact_x = x.detach().double().requires_grad_()
    random = torch.rand(200, 8).argsort(1)[:, :4].to(DEVICE)
    random[::5, 1] = -1
    one_hot = torch.full_like(random, -1)
    one_hot[:, 0] = 3
    ids = random.clone()

    outputs, replay = captured(lambda: layer_step(layer, function, x, grad, ids))
    assert {(op, NATIVE) for op in LAYER_OPS} <= ran, ran
    routings = random.roll(7, 0), one_hot, torch.full_like(ids, 3), torch.full_like(ids, -1)
    names = ["y", "x.grad", *(f"{name}.grad" for name, _ in layer.named_parameters())]
    for routing in routings:
        ids.copy_(routing)
        replay()
        compiled = layer_step(layer, function, x, grad, ids)
        eager = layer_step(layer, layer, x, grad, ids)
        expected = layer_step(exact, exact, exact_x, grad.double(), ids)
        for name, *results in zip(names, outputs, compiled, eager, expected, strict=True):
            found, same, same_dtype, f64 = results
            assert_equal(name, found, same)
            assert_close(name, found, f64, same_dtype)
    assert not outputs[0].count_nonzero(), "output of tokens without experts"
    layer.check_overflow()


# Under NVIDIA's tools.


def find_sanitizer() -> str | None:
    nvcc = build.find_nvcc()
    beside = shutil.which("compute-sanitizer", path=nvcc.parent) if nvcc else None
    return shutil.which("compute-sanitizer") or beside


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_native_passes_compute_sanitizer(tool: str) -> None:
    sanitizer = find_sanitizer()
    if sanitizer is None:
        pytest.skip("optional package compute-sanitizer is not installed")
    # Each tensor in memory of its own, or what lies past one would be memory of another.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = [sanitizer, "--tool", tool, "--error-exitcode", "1", "--report-api-errors", "no"]
    done = subprocess.run(
        [*command, sys.executable, "-m", native_calls.__name__],
        cwd=build.ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
