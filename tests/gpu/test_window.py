"""Tensors in a window: disjoint, given back when their storage dies, and not written too early."""

from __future__ import annotations

import gc

import pytest
import torch

from moe_ops.comm.window import Window

pytestmark = pytest.mark.gpu

KIB = 1024


def must(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return tensor


def window_of(num_bytes: int) -> Window:
    return Window(torch.zeros(num_bytes, dtype=torch.uint8, device="cuda"))


def test_tensors_are_disjoint_and_inside() -> None:
    window = window_of(64 * KIB)
    tensors = [must(window.empty((3, 100), torch.float32)) for _ in range(20)]
    for number, tensor in enumerate(tensors):
        assert tensor.shape == (3, 100) and tensor.dtype == torch.float32
        tensor.fill_(number)
    assert all((tensor == number).all() for number, tensor in enumerate(tensors))


def test_a_full_window_says_so_and_takes_back() -> None:
    window = window_of(4 * KIB)
    first, second = (must(window.empty((2 * KIB,), torch.uint8)) for _ in range(2))
    assert window.empty((1,), torch.uint8) is None
    view = first[5:7]
    del first
    gc.collect()
    assert window.empty((1,), torch.uint8) is None, "a view uses the storage"
    del view, second
    gc.collect()
    assert window.empty((4 * KIB,), torch.uint8) is not None, "free parts are one again"


def test_no_rows_take_little() -> None:
    window = window_of(KIB)
    assert must(window.empty((0, 7), torch.bfloat16)).shape == (0, 7)
    assert window_of(0).empty((0, 7), torch.bfloat16) is None


def test_what_a_graph_took_stays_its_own() -> None:
    window = window_of(4 * KIB)
    before = must(window.empty((KIB,), torch.uint8))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        inside = must(window.empty((KIB,), torch.uint8)).fill_(1)
        place = inside.data_ptr()
        del inside, before
        assert must(window.empty((KIB,), torch.uint8)).data_ptr() != place
    gc.collect()
    others = [must(window.empty((KIB,), torch.uint8)).zero_() for _ in range(2)]
    assert window.empty((KIB,), torch.uint8) is None, "two parts are the graph's"
    graph.replay()
    assert not torch.stack(others).any()


def test_what_comes_next_waits_for_who_read() -> None:
    window, aside = window_of(4 * KIB), torch.cuda.Stream()
    read = torch.empty(KIB, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(aside):
        first = must(window.empty((KIB,), torch.int32))
        first.fill_(7)
        torch.cuda._sleep(20_000_000)  # cycles, about 10 ms
        read.copy_(first)
        del first
    must(window.empty((KIB,), torch.int32)).fill_(8)
    torch.cuda.synchronize()
    assert (read == 7).all()
