"""What every operator is checked for in the same way."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from moe_ops.testing import DTYPE_NAMES, assert_close, assert_equal
from tests.ranks import run_on_ranks

from .samples import Sizes, overload, samples

DTYPES = list(DTYPE_NAMES)
GRAD_LAYOUTS = ("plain", "expanded", "transposed", "slice")

all_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_NAMES.get)
all_grad_layouts = pytest.mark.parametrize("grad_layout", GRAD_LAYOUTS)


def values(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Normal values; the same ones, rounded, in every dtype."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def make_grad(like: torch.Tensor, layout: str) -> torch.Tensor:
    """A gradient of `like` as autograd may hand it on: stride 0, transposed, a slice."""
    grad = values(*like.shape, dtype=like.dtype, seed=99)
    if layout == "expanded":  # y.sum().backward()
        return torch.ones((), dtype=like.dtype).expand(like.shape)
    if layout == "transposed":
        return grad.mT.contiguous().mT if grad.dim() > 1 else grad
    if layout == "slice":
        return torch.stack([grad, grad], dim=-1)[..., 0]
    return grad


def check_against_oracle(
    function: Callable[..., torch.Tensor],
    oracle: Callable[..., torch.Tensor],
    inputs: dict[str, torch.Tensor],
    grad_layout: str = "plain",
) -> None:
    """function(*inputs) and its gradients against those of a float64 oracle, all in dtype."""
    leaves = [value.detach().requires_grad_() for value in inputs.values()]
    leaves_f64 = [value.detach().double().requires_grad_() for value in inputs.values()]
    actual = function(*leaves)
    # The zero lets gradients exist where nothing was routed.
    expected = oracle(*leaves_f64) + 0 * sum(leaf.sum() for leaf in leaves_f64)
    assert_close("output", actual, expected)
    assert actual.is_contiguous()
    grad = make_grad(actual, grad_layout)
    grads = torch.autograd.grad(actual, leaves, grad)
    grads_f64 = torch.autograd.grad(expected, leaves_f64, grad.double())
    for name, leaf, found, wanted in zip(inputs, leaves, grads, grads_f64):
        assert found.dtype == leaf.dtype, f"grad of {name}"
        assert_close(f"grad of {name}", found, wanted)


def check_double_backward(function: Callable[..., Any], *inputs: torch.Tensor) -> None:
    """gradcheck and gradgradcheck in float64."""
    leaves = [value.detach().double().requires_grad_() for value in inputs]
    assert torch.autograd.gradcheck(function, leaves)
    assert torch.autograd.gradgradcheck(function, leaves)


def check_double_backward_raises(
    op: str, function: Callable[..., Any], *inputs: torch.Tensor
) -> None:
    """gradcheck in float64; the gradient of the gradient is an error that names the backward."""
    leaves = [value.detach().double().requires_grad_() for value in inputs]
    assert torch.autograd.gradcheck(function, leaves)
    grads = torch.autograd.grad(function(*leaves).square().sum(), leaves, create_graph=True)
    with pytest.raises(NotImplementedError, match=f"{op}_backward: has no derivative"):
        torch.autograd.grad(sum(grad.square().sum() for grad in grads), leaves)


def check_compiled(
    function: Callable[..., Any], *inputs: Any, backend: str = "aot_eager", exact: bool = True
) -> None:
    """fullgraph compile: outputs and gradients as in eager."""

    def run(callee: Callable[..., Any]) -> list[torch.Tensor]:
        leaves = [
            i.detach().requires_grad_() if isinstance(i, torch.Tensor) and i.requires_grad else i
            for i in inputs
        ]
        outputs = pytree.tree_leaves(callee(*leaves))
        wanted = [x for x in leaves if isinstance(x, torch.Tensor) and x.requires_grad]
        scalars = [(o.square() * 0.5).sum() for o in outputs if o.requires_grad]
        grads = torch.autograd.grad(sum(scalars), wanted) if scalars else ()
        return [*outputs, *grads]

    torch._dynamo.reset()
    expected = run(function)
    actual = run(torch.compile(function, fullgraph=True, backend=backend))
    for index, (found, wanted) in enumerate(zip(actual, expected, strict=True)):
        if exact or not found.is_floating_point():
            assert_equal(f"result {index}", found, wanted)
        else:
            assert_close(f"result {index}", found, wanted)


def partitioned(function: Callable[..., Any], *inputs: torch.Tensor) -> list[GraphModule]:
    """Forward and backward of function(*inputs)[0], as Inductor partitions them."""
    found: list[GraphModule] = []

    def keep(module: GraphModule, inputs: Any) -> GraphModule:
        found.append(module)
        return module

    backend = aot_autograd(
        fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition
    )
    leaves = [value.requires_grad_() for value in inputs]
    # Products, so that the leaves are no inputs that are kept for free.
    compiled = torch.compile(
        lambda *x: function(*(value * 2 for value in x))[0], fullgraph=True, backend=backend
    )
    compiled(*leaves).sum().backward()
    return found


def num_saved(forward: GraphModule) -> int:
    """Floating elements that a partitioned forward of one output keeps for backward, but masks."""
    saved = [node.meta["val"] for node in forward.graph.output_node().args[0][1:]]
    return sum(x.numel() for x in saved if x.is_floating_point() and x.dim() != 2)


def check_rejects(
    op: str,
    function: Callable[..., Any],
    good: dict[str, Any],
    changes: dict[str, Any],
    error: type[Exception],
    message: str,
) -> None:
    """function(**good) works; with `changes` it raises `error` naming op, argument, rule, value."""
    function(**good)
    with pytest.raises(error, match=f"^{op}: .*{message}"):
        function(**{**good, **changes})


def check_opcheck(op: str, sizes: Sizes | None = None, first_only: bool = False) -> None:
    """All four of opcheck's tests on every sample, or on the plainest."""
    for arguments in samples(op, sizes)[: 1 if first_only else None]:
        torch.library.opcheck(overload(op), arguments)


def check_fake(op: str, arguments: tuple[Any, ...]) -> None:
    """Shapes, strides, dtypes, devices of the fake kernel are those of the real one."""
    # Static input shapes: opcheck covers symbolic ones, and symbols cost ten times the time.
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=False, static_shapes=True)
    fakes = pytree.tree_map_only(torch.Tensor, mode.from_tensor, arguments)
    with mode:
        fake_outputs = pytree.tree_leaves(overload(op)(*fakes))
    outputs = pytree.tree_leaves(overload(op)(*arguments))
    sizes: dict[Any, int] = {}
    for index, (fake, real) in enumerate(zip(fake_outputs, outputs, strict=True)):
        assert fake.dtype == real.dtype, f"{op} output {index}"
        assert fake.device == real.device, f"{op} output {index}"
        assert fake.dim() == real.dim(), f"{op} output {index}"
        for symbolic, number in zip(fake.shape, real.shape):
            if isinstance(symbolic, torch.SymInt) and symbolic.node.expr.is_Symbol:
                assert sizes.setdefault(symbolic.node.expr, number) == number
        shape = _numbers(fake.shape, sizes)
        assert shape == [*real.shape], f"{op} output {index}: shape"
        # Strides of empty tensors and of dimensions of size 1 mean nothing.
        strides = zip(shape, _numbers(fake.stride(), sizes), real.stride())
        if real.numel():
            assert all(size == 1 or found == wanted for size, found, wanted in strides), (
                f"{op} output {index}: strides {fake.stride()} and {real.stride()}"
            )


def _numbers(values: Any, sizes: dict[Any, int]) -> list[int]:
    return [int(v.node.expr.subs(sizes)) if isinstance(v, torch.SymInt) else v for v in values]


def world() -> str:
    """Name of the group of all ranks."""
    return dist.group.WORLD.group_name


def group(num_ranks: int) -> str | None:
    """What `on_ranks` runs its function in."""
    return world() if num_ranks > 1 else None


def on_ranks(num_ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """`function(rank, num_ranks, *args)` of each rank; of a single one without any processes."""
    if num_ranks == 1:
        return [function(0, 1, *args)]
    return run_on_ranks(num_ranks, function, num_ranks, *args)


@functools.cache
def group_of(*members: int) -> dist.ProcessGroup:
    """The group of these ranks, made once; every rank of the world must ask for it."""
    return dist.new_group(list(members))
