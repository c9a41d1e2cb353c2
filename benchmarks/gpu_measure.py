"""What benchmarks of kernels on a CUDA GPU share: a bandwidth to compare with, calls timed by graph replay, results
compared with those of plain torch."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
import triton
from torch import Tensor

DEVICE = torch.device("cuda")
REPLAYS = 30
Call = Callable[[], Any]


def copy_bandwidth() -> float:
    """Bytes read and written a second by a large device-to-device copy."""
    source = torch.randn(1 << 29, device=DEVICE)
    target = torch.empty_like(source)
    milliseconds = triton.testing.do_bench(lambda: target.copy_(source), warmup=20, rep=100, return_mode="median")
    return 2 * source.nbytes / milliseconds * 1e3


def replay_time(calls: Sequence[Callable[[], object]], repeats: int = 15) -> float:
    """Microseconds a call: median over replays of a graph that holds all calls."""
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return 1e3 * statistics.median(times) / len(calls)


def microseconds(calls: list[Call]) -> float:
    """Median time of one call, by replays of a graph of all of them."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call() for call in calls]
    for _ in range(3):
        graph.replay()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    del kept
    times = [a.elapsed_time(b) for a, b in pairwise(marks)]
    return statistics.median(times) / len(calls) * 1e3


@contextmanager
def plain_torch() -> Iterator[None]:
    """Inside, the dispatching functions run their torch versions."""
    before = os.environ.get("DSCALE_TRITON")
    os.environ["DSCALE_TRITON"] = "0"
    try:
        yield
    finally:
        os.environ.pop("DSCALE_TRITON")
        if before is not None:
            os.environ["DSCALE_TRITON"] = before


def plain(function: Callable[..., Any], *arguments: Any) -> Call:
    """A call of the torch version."""

    def call() -> Any:
        with plain_torch():
            return function(*arguments)

    return call


def relative(got: Any, want: Any) -> float:
    """The largest ‖got - want‖ / ‖want‖ over the tensors of two results."""
    pairs = zip(tensors(got), tensors(want), strict=True)
    return max(float((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30)) for a, b in pairs)


def share_different(got: Any, want: Any) -> float:
    """The largest share of differing entries over the tensors of two results."""
    pairs = zip(tensors(got), tensors(want), strict=True)
    return max(float((a != b).double().mean()) for a, b in pairs)


def tensors(result: Any) -> list[Tensor]:
    """Every tensor in nested tuples and dataclasses, in order."""
    if isinstance(result, Tensor):
        return [result]
    parts = result if isinstance(result, (tuple, list)) else vars(result).values()
    return [one for part in parts for one in tensors(part)]
