"""The `torch.ops.moe_ops` namespace: one call of `define` registers everything an operator has."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import pathlib
from collections.abc import Callable, Iterable
from typing import Any

import torch

from . import _inductor

_LIBRARY = torch.library.Library("moe_ops", "DEF")
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)


@dataclasses.dataclass(frozen=True)
class OpInfo:
    """What is known of one operator of `torch.ops.moe_ops`."""

    name: str
    schema: str
    module: str
    check: Callable[..., Any]
    reference: Callable[..., Any]
    fake: Callable[..., Any]
    has_backward: bool


OPS: dict[str, OpInfo] = {}
PRIVATE_OPS: dict[str, OpInfo] = {}  # what graph passes emit after the partitioner


def info(op: str) -> OpInfo:
    """Of any operator.

    Raises:
        ValueError: there is none of this name.
    """
    if (found := OPS.get(op) or PRIVATE_OPS.get(op)) is None:
        raise ValueError(f"moe_ops: op must be the name of an operator, got {op!r}")
    return found


def first_tensor(args: Iterable[Any]) -> torch.Tensor:
    """The first of an operator's arguments that is a tensor."""
    return next(arg for arg in args if isinstance(arg, torch.Tensor))


def define(
    schema: str,
    *,
    check: Callable[..., Any],
    reference: Callable[..., Any],
    fake: Callable[..., Any],
    setup_context: Callable[..., Any] | None = None,
    backward: Callable[..., Any] | None = None,
    private: bool = False,
) -> Any:
    """Register the operator `schema` and return what its public function calls.

    `check` gets the operator's arguments and raises on bad ones; it runs before the reference (the
    CPU kernel), the CUDA kernel (`kernels.choose`) and the fake kernel, so a caller of the bare
    operator, eager or traced, is told as much as one of the public function. For an operator that
    takes a `group_name` it returns the settings that must be equal on all ranks, and `comm.agree`
    turns a failure on one rank into an error on every rank. Without a `backward` the operator
    raises when a gradient is asked of it. A `private` operator is one that only passes emit.
    """
    from . import comm, kernels  # noqa: PLC0415 - comm and kernels may import this module

    name = schema.split("(", 1)[0]
    _LIBRARY.define(schema, tags=_TAGS)
    overload = getattr(torch.ops.moe_ops, name).default
    group_at = _place_of("group_name", reference)
    if group_at is not None:
        _inductor.COLLECTIVE.add(overload)

    def checked(kernel: Callable[..., Any], device: str) -> Callable[..., Any]:
        @functools.wraps(kernel)
        def call(*args: Any) -> Any:
            if group_at is None:
                check(*args)
            else:
                comm.agree(name, args[group_at], functools.partial(check, *args))
            return _without_autocast(device, kernel, args)

        return call

    def cuda(*args: Any) -> Any:
        return _on_its_device(kernels.choose(name, *args), args)

    def checked_fake(*args: Any) -> Any:
        check(*args)
        if group_at is not None:
            _inductor.keep_collectives()
        return fake(*args)

    _LIBRARY.impl(name, checked(reference, "cpu"), "CPU")
    _LIBRARY.impl(name, checked(cuda, "cuda"), "CUDA")
    qualified_name = overload._schema.name
    torch.library.register_fake(qualified_name, checked_fake, lib=_LIBRARY)
    torch.library.register_autograd(
        qualified_name, backward or _no_backward(name), setup_context=setup_context, lib=_LIBRARY
    )
    torch.library.register_vmap(qualified_name, _no_vmap(name), lib=_LIBRARY)
    found = OpInfo(name, schema, reference.__module__, check, reference, fake, bool(backward))
    (PRIVATE_OPS if private else OPS)[name] = found
    return _public(overload, group_at)


def _place_of(name: str, function: Callable[..., Any]) -> int | None:
    parameters = list(inspect.signature(function).parameters)
    return parameters.index(name) if name in parameters else None


def _public(overload: torch._ops.OpOverload, group_at: int | None) -> Callable[..., Any]:
    """The operator as public functions call it: refuses what the dispatcher would take silently, or
    reject on this rank alone. `group_at` is the place of `group_name` among the arguments.
    """
    from . import comm  # noqa: PLC0415 - comm may import this module

    name = overload._schema.name.split("::")[1]
    tensors = [argument.type.kind() == "TensorType" for argument in overload._schema.arguments]

    def call(*args: Any) -> Any:
        if torch.compiler.is_compiling():
            return overload(*args)
        # NOTE: PyTorch drops the tangents of an operator like these under torch.func.jvp.
        if torch._C._functorch.maybe_current_level() is not None:
            raise NotImplementedError(
                f"{name}: must be called outside torch.func and torch.vmap, got a call inside; "
                "use torch.autograd, and concatenate samples along the token dimension"
            )
        wrong = [
            a for a, tensor in zip(args, tensors) if tensor and not isinstance(a, torch.Tensor)
        ]
        if wrong:
            error = TypeError(f"{name}: tensors must be given, got {type(wrong[0]).__name__}")
            comm.agree(name, "" if group_at is None else args[group_at], _raising(error))
        return overload(*args)

    return call


def _raising(error: Exception) -> Callable[[], None]:
    def check() -> None:
        raise error

    return check


def _without_autocast(device: str, kernel: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Matmuls within a kernel keep the dtype that its fake promises."""
    if not torch.is_autocast_enabled(device):
        return kernel(*args)
    with torch.autocast(device, enabled=False):
        return kernel(*args)


def _on_its_device(kernel: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Triton launches on the current device, wherever the tensors are."""
    device = first_tensor(args).device
    if device.index == torch.cuda.current_device():
        return kernel(*args)
    with torch.cuda.device(device):
        return kernel(*args)


def _no_backward(name: str) -> Callable[..., Any]:
    def backward(ctx: Any, *grads: Any) -> Any:
        raise NotImplementedError(
            f"{name}: has no derivative, got a gradient of its output; "
            "derivatives of this order are not supported"
        )

    return backward


def _no_vmap(name: str) -> Callable[..., Any]:
    def rule(info: Any, in_dims: Any, *args: Any) -> Any:
        raise NotImplementedError(
            f"{name}: must not be called under torch.vmap, got in_dims {in_dims}; "
            "concatenate the samples along the token dimension instead"
        )

    return rule


@functools.cache
def source_hash(package: pathlib.Path = pathlib.Path(__file__).parent) -> str:
    """Hash of a package's Python sources (hex), by default this one's.

    Compile caches key on operator names, not on their fake kernels or autograd rules, so without it
    an upgraded library would be served gradients compiled from the old one
    (https://github.com/pytorch/pytorch/issues/144344).
    """
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def tag_compile_caches(*more: str) -> None:
    """Put `source_hash`, and on what else the graphs of operators depend, into the key of PyTorch's
    compile caches, keeping what a user put there.
    """
    config = torch.compiler.config
    tags = [
        tag for tag in config.cache_key_tag.split(";") if tag and not tag.startswith("moe_ops-")
    ]
    config.cache_key_tag = ";".join((*tags, "-".join(("moe_ops", source_hash(), *more))))
