"""Tensors in a given piece of GPU memory, which lives as long as they do."""

from __future__ import annotations

import collections
import sys
import threading
from typing import Any

import torch

from . import in_flight

_ALIGNMENT = 512


class Window:
    """Hands out parts of `memory`, uint8 on a GPU, as tensors; a part is free again once no tensor
    uses its storage. A part taken while a CUDA graph is captured is never free again.

    What takes a part over waits for the streams that were current at the tensor's making and at its
    death. Work of other streams must be ordered before those; `record_stream` does nothing.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory
        self._free = [(0, memory.numel())]  # sorted, none touching the next
        self._given_back: collections.deque[_Part] = collections.deque()
        self._lock = threading.Lock()

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        """An unfilled tensor, or None where no free part is large enough, and within the CUDA
        graphs of `torch.compile(mode="reduce-overhead")`, which take no memory but their own.

        The current stream waits for what used the parts that have become free.
        """
        stream = torch.cuda.current_stream(self._memory.device)
        if in_flight.in_tree_of_graphs(self._memory.device):
            return None
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        size = -(-max(num_bytes, 1) // _ALIGNMENT) * _ALIGNMENT
        with self._lock:
            self._collect(stream)
            fitting = (place for place, (a, b) in enumerate(self._free) if b - a >= size)
            if (place := next(fitting, None)) is None:
                return None
            start, end = self._free.pop(place)
            if end - start > size:
                self._free.insert(place, (start + size, end))
        part = _Part(self, start, start + size, stream)
        return torch.as_tensor(part, device=self._memory.device)[:num_bytes].view(dtype).view(shape)

    def _collect(self, stream: torch.cuda.Stream) -> None:
        if not self._given_back:
            return
        # A graph's capture begins after all work outside it has ended: nothing to wait for.
        waits = not torch.cuda.is_current_stream_capturing()
        while self._given_back:
            part = self._given_back.popleft()
            for event in part.done if waits else ():
                stream.wait_event(event)
            self._free.append((part.start, part.end))
        merged: list[tuple[int, int]] = []
        for start, end in sorted(self._free):
            if merged and merged[-1][1] == start:
                merged[-1] = (merged[-1][0], end)
            else:
                merged.append((start, end))
        self._free = merged


class _Part:
    """Kept by the storage of the tensor that PyTorch makes of it."""

    def __init__(self, window: Window, start: int, end: int, maker: torch.cuda.Stream) -> None:
        self.window, self.start, self.end, self.maker = window, start, end, maker
        self.captured = torch.cuda.is_current_stream_capturing()
        self.done: list[torch.cuda.Event] = []

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (self.end - self.start,),
            "typestr": "|u1",
            "data": (self.window._memory.data_ptr() + self.start, False),
            "version": 2,
        }

    def __del__(self) -> None:
        if sys.is_finalizing() or self.captured:
            return
        if not torch.cuda.is_current_stream_capturing():  # or else all has been waited for
            streams = {self.maker, torch.cuda.current_stream(self.window._memory.device)}
            self.done = [stream.record_event() for stream in streams]
        self.window._given_back.append(self)  # no lock: `empty` may hold it while this runs
