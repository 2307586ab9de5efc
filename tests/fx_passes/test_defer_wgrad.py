"""Gradients of weights move into windows, as long as that pays."""

from __future__ import annotations

import bisect
from typing import Any

import pytest
import torch

from fx_passes.defer_wgrad import DeferWgrad, defer_wgrad_pass, find_wgrads
from fx_passes.journal import Journal, listening
from fx_passes.windows import Bounds, fillings

from .windowed import Times, check_fills, check_refuses, combine, dispatch, kernels, trace

HIDDEN = "the exchange is hidden"
DEPENDENT = "nothing else is independent of the exchange"
HIDES_ANOTHER = "what is independent of the exchange hides another one"
EXCHANGES = {"dispatch_start": 10.0, "combine_start": 10.0}


def backward(x, ids, w):
    """mm_1, mm_3 and mm_5 are gradients of weights, in front of, between and after exchanges."""
    g = x @ w
    first = x.T @ g
    rows, plan = dispatch(g, ids)
    rows = rows @ w
    second = rows.T @ rows
    back = combine(rows, plan) @ w
    return back, first, second, g.T @ g


BEFORE = "mm mm_1 dispatch_start dispatch_wait mm_2 combine_start mm_3 combine_wait mm_4 mm_5"


def test_defer_wgrad_finds_what_no_kernel_needs() -> None:
    module, _ = trace(backward)
    assert kernels(module.graph) == BEFORE
    wgrads = [node.name for node in find_wgrads(module.graph)]
    assert wgrads == ["mm_1", "mm_3", "mm_4", "mm_5"], "mm_4 is nobody's input either"


def test_defer_wgrad_moves_later_and_earlier() -> None:
    times = {**EXCHANGES, "mm_1": 3.0, "mm_5": 5.0, "mm_3": 10.0}
    expected = "mm dispatch_start mm_5 mm_1 dispatch_wait mm_2 combine_start mm_3 combine_wait mm_4"
    graph = check_fills(defer_wgrad_pass, backward, times, expected, 2)
    (name, first), (_, second) = fillings(graph)
    assert name == "defer_wgrad"
    assert str(first) == "dispatch: got mm, mm; 2.0 of 10.0 us stay exposed"
    assert first.reason == DEPENDENT
    assert (second.moved, second.exposed, second.reason) == ((), 0.0, HIDDEN)


def test_defer_wgrad_prefers_the_longest_that_fits() -> None:
    times = {**EXCHANGES, "mm_1": 12.0, "mm_5": 8.0, "mm_3": 3.0, "combine_start": 3.0}
    expected = "mm dispatch_start mm_5 mm_1 dispatch_wait mm_2 combine_start mm_3 combine_wait mm_4"
    check_fills(defer_wgrad_pass, backward, times, expected, 2)
    expected = "mm mm_1 dispatch_start mm_5 dispatch_wait mm_2 combine_start mm_3 combine_wait mm_4"
    times["dispatch_start"] = 8.0
    check_fills(defer_wgrad_pass, backward, times, expected, 1)


def test_defer_wgrad_leaves_the_rest_to_later_windows() -> None:
    """mm_1 is more than the first window needs, so the second gets what mm_5 takes away."""
    times = {**EXCHANGES, "mm_1": 9.0, "mm_5": 10.0, "mm_3": 1.0}
    expected = "mm dispatch_start mm_5 dispatch_wait mm_2 combine_start mm_3 mm_1 combine_wait mm_4"
    check_fills(defer_wgrad_pass, backward, times, expected, 2)


def test_defer_wgrad_moves_calls_that_are_not_short() -> None:
    times = {**EXCHANGES, "mm_1": 4.0, "mm_5": 5.0}
    bounds = DeferWgrad(min_us=4.5)
    expected = "mm mm_1 dispatch_start mm_5 dispatch_wait mm_2 combine_start mm_3 combine_wait mm_4"
    check_fills(defer_wgrad_pass, backward, times, expected, 1, bounds)


def stacked(x, ids, w):
    """Two layers: more than the first one's windows need is left for the second's."""
    grads = []
    for _ in range(2):
        rows, plan = dispatch(x, ids)
        rows = rows @ w
        grads += [rows.T @ rows, x.T @ rows]
        x = combine(rows, plan)
    return x, *grads


def test_defer_wgrad_moves_across_layers() -> None:
    times = {"dispatch_start": 3.0, "combine_start": 4.0, "mm_1": 4.0, "mm_2": 3.0}
    expected = (
        "dispatch_start dispatch_wait mm combine_start mm_1 combine_wait "
        "dispatch_start mm_2 dispatch_wait mm_3 combine_start mm_4 mm_5 combine_wait"
    )
    check_fills(defer_wgrad_pass, stacked, times, expected, 1)


def test_defer_wgrad_refuses_what_is_hidden(caplog: pytest.LogCaptureFixture) -> None:
    check_refuses(defer_wgrad_pass, backward, {"mm_1": 4.0}, HIDDEN, caplog)


def alone(x, ids, w):
    rows, plan = dispatch(x @ w, ids)
    rows = rows @ w
    return combine(rows, plan), rows.T @ rows


def test_defer_wgrad_refuses_what_needs_the_exchange(caplog: pytest.LogCaptureFixture) -> None:
    times = {"dispatch_start": 10.0, "mm_1": 4.0, "mm_2": 4.0}
    check_refuses(defer_wgrad_pass, alone, times, DEPENDENT, caplog)


def test_defer_wgrad_refuses_what_hides_another(caplog: pytest.LogCaptureFixture) -> None:
    def function(x, ids, w):
        rows, plan = dispatch(x, ids)
        wgrad = x.T @ x
        return combine(rows * 2, plan) @ w, wgrad

    times = {"dispatch_start": 10.0, "combine_start": 10.0, "mm": 4.0}
    check_refuses(defer_wgrad_pass, function, times, HIDES_ANOTHER, caplog)


def wide(x, ids, w):
    """Until its weight's gradient is there, `wide` lives."""
    wide = torch.cat([x @ w] * 64, 1)
    wgrad = wide.T @ x
    rows, plan = dispatch(x, ids)
    return combine(rows * 2, plan), wgrad


def test_defer_wgrad_keeps_to_its_memory(caplog: pytest.LogCaptureFixture) -> None:
    times = {"dispatch_start": 10.0, "mm_1": 4.0}
    module, _ = trace(wide)
    assert defer_wgrad_pass(module.graph, Times(times), DeferWgrad(max_bytes=2**20)) == 1
    bounds = range(0, 2**20, 4)
    grown = bounds[bisect.bisect_left(bounds, 1, key=lambda bound: _moves(times, bound))]
    assert 0 < grown < 7 * 512 * 4, "what the exchange makes, not what lives anyway"
    reason = f"mm would raise the peak by {grown} bytes"
    check_refuses(defer_wgrad_pass, wide, times, reason, caplog, DeferWgrad(max_bytes=grown - 4))


def _moves(times: dict[str, float], max_bytes: int) -> int:
    return defer_wgrad_pass(trace(wide)[0].graph, Times(times), DeferWgrad(max_bytes=max_bytes))


def random(x, ids, w):
    wgrad = torch.rand_like(x).T @ x
    torch.rand_like(x)
    rows, plan = dispatch(x, ids)
    return combine(rows * 2, plan) @ w, torch.rand_like(w) @ wgrad.T


def changed(x, ids, w):
    total = w * 1
    rows, plan = dispatch(x, ids)
    y = combine(rows * 2, plan) @ w
    wgrad = x.T @ total[:7]
    total.add_(1)
    return y, wgrad, total


@pytest.mark.parametrize("function", [random, changed])
def test_defer_wgrad_refuses_what_must_stay(
    function: Any, caplog: pytest.LogCaptureFixture
) -> None:
    times = {"dispatch_start": 10.0, "mm": 4.0, "mm_1": 4.0, "mm_2": 4.0}
    module, _ = trace(function)
    assert find_wgrads(module.graph)
    check_refuses(defer_wgrad_pass, function, times, DEPENDENT, caplog)


def test_defer_wgrad_tells_who_listens() -> None:
    module, _ = trace(backward)
    journal = Journal()
    with listening(journal):
        defer_wgrad_pass(module.graph, Times({**EXCHANGES, "mm_1": 9.0}), Bounds())
    texts = [(decision.match, decision.reason) for decision in journal.decisions]
    assert texts == [
        ("dispatch: got mm; 1.0 of 10.0 us stay exposed", None),
        ("combine: 10.0 of 10.0 us stay exposed", HIDES_ANOTHER),
    ]
