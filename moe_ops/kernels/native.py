"""The library of CUDA kernels compiled from csrc/, whose operators are `torch.ops.moe_ops_native`.

`pip install .` and `make native` build it where nvcc is found; the kernels of Triton and PyTorch
serve without it. Environment: MOE_OPS_NATIVE=0 turns it off, MOE_OPS_NATIVE_LIBRARY=/path/x.so
names another file.
"""

from __future__ import annotations

import functools
import logging
import os
from pathlib import Path
from typing import NamedTuple

import torch

_log = logging.getLogger(__name__)
_BUILT = Path(__file__).parent.parent / "lib" / "libmoe_ops_cuda.so"
_HOW_TO_BUILD = "run `python -m csrc.build` in a clone where nvcc is, or install there"


class _State(NamedTuple):
    loaded: bool
    text: str
    level: int = logging.INFO


def available() -> bool:
    """Whether the library is loaded; the first call loads it, or logs why not.

    A library named by MOE_OPS_NATIVE_LIBRARY that cannot be loaded is an error.
    """
    return _state().loaded


def status() -> str:
    """What became of the library, for people."""
    try:
        return _state().text
    except RuntimeError as error:
        return str(error)


@functools.cache
def _state() -> _State:
    state = _load()
    if not state.loaded:
        _log.log(state.level, "native kernels: %s", state.text)
    return state


def _load() -> _State:
    if os.environ.get("MOE_OPS_NATIVE") == "0":
        return _State(False, "off: MOE_OPS_NATIVE=0")
    named = os.environ.get("MOE_OPS_NATIVE_LIBRARY")
    path = Path(named) if named else _BUILT
    if not path.exists():
        state = _State(False, f"not built: no {path}; {_HOW_TO_BUILD}")
    elif not torch.cuda.is_available():
        # NOTE: the library needs a symbol that only CUDA builds of PyTorch have.
        return _State(False, f"built: {path}, not loaded: no GPU")
    else:
        try:
            torch.ops.load_library(path)
            return _State(True, f"built: {path}")
        except OSError as error:
            reason = error.__cause__ or error  # PyTorch's own message does not say
            text = f"cannot load: {reason}; {_HOW_TO_BUILD}"
            state = _State(False, text, logging.WARNING)
    if named:
        raise RuntimeError(
            f"MOE_OPS_NATIVE_LIBRARY: must name a library that loads, got {named}; {state.text}"
        )
    return state
