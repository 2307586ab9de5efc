"""Every test runs with NaN in uninitialised memory, one thread and fixed seeds."""

from __future__ import annotations

import logging
import os
import random

import hypothesis
import pytest
import torch

from moe_ops.testing import fill_empty_with_nan

pytest_plugins = ["tests.skip_guard"]

# cuBLAS is deterministic, as the tests demand, only with a workspace of its own.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
# Read where Triton kernels are defined, so before any test imports them.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
torch.set_num_threads(1)
fill_empty_with_nan()
# PyTorch prints every graph it compiles to a logger as soon as that has a handler, and pytest gives
# its own to each that does not propagate.
logging.getLogger("torch.__trace").propagate = True

# The same examples in every run: a failure that comes and goes helps nobody.
hypothesis.settings.register_profile(
    "moe_ops",
    deadline=None,
    derandomize=True,
    max_examples=50,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("moe_ops")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no GPU"))


@pytest.fixture(autouse=True)
def _fixed_seeds() -> None:
    random.seed(0)
    torch.manual_seed(0)
