"""Whole decode steps captured as CUDA graphs: one a (request bucket, size of the step, greedy or sampled).

A step reads and writes device memory of fixed addresses only: state, caches, weights, and one workspace whose first
N_bs lanes are what the bucket of N_bs sees. Between replays lanes, lengths, pages and anchors change by small copies in
the same stream. All graphs share one memory pool. Lanes not in use point to the scratch row, which owns the scratch
page, and are not live: they take no verification rows.

What captures and replays is a parameter (CaptureBackend), so that a CPU can prove the workspace complete.
"""

from __future__ import annotations

import gc
import logging
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Protocol, TypeVar

import torch

from dscale.config import GRAPH_KINDS, LEAST_TEMPERATURE, PAGE_SIZE
from dscale.engine.results import Outputs
from dscale.kernels import triton
from dscale.kernels.attention import arrival_counters
from dscale.speculation.decode_step import decode_step
from dscale.speculation.policies import Policy
from dscale.speculation.state import DeviceState, Models
from dscale.speculation.workspace import StepShape, Workspace

BUDGETS = (4, 6, 8, 12, 16)  # rows a request between which `auto` chooses (dscale.md §5)
TIMED_REPLAYS = 12
WARM_RUNS = 2  # of a step before its capture: kernels are compiled and cuBLAS takes its workspace outside of it
TYPICAL_CONTEXT = 256  # committed tokens of the lanes in a timed replay
Step = Callable[[], Outputs]
Result = TypeVar("Result")


def buckets(most: int) -> list[int]:
    """Captured numbers of requests: 1, 2, 4, 8, then in halves of powers of two, multiples of 8, up to `most`."""
    sizes = [1, 2, 4, 8] + [size for power in range(4, 31) for size in (1 << power, 3 << (power - 1))]
    return [size for size in sizes if size < most] + [most]


def capturable(models: Models) -> bool:
    """Whether a step of these models reads nothing back: its attention runs on the Triton kernels."""
    decoders = [models.target.config.decoder]
    if models.drafter is not None:
        decoders.append(models.drafter.config.decoder)
    with torch.inference_mode():
        fast = triton.usable(models.target_cache)
    return fast and all(16 <= one.head_dim <= 256 and one.head_dim & (one.head_dim - 1) == 0 for one in decoders)


def kinds_for(temperatures: Iterable[float]) -> str:
    """EngineConfig.graph_kinds that requests of these temperatures need."""
    greedy = {temperature < LEAST_TEMPERATURE for temperature in temperatures}
    return next(name for name, kinds in GRAPH_KINDS.items() if greedy <= set(kinds))


class CaptureBackend(Protocol):
    """Captures a step that reads and writes fixed memory."""

    def capture(self, step: Callable[[], Result], runs: int = WARM_RUNS) -> tuple[Result, Callable[[], None]]:
        """Run the step `runs` times, capture it; its outputs, which stay where they are, and the replay that fills
        them."""
        ...

    def seconds(self, before: Callable[[], None], replay: Callable[[], None], repeats: int) -> float:
        """Median seconds of a replay, each right after `before`."""
        ...

    def free(self) -> int:
        """Bytes free on the device, or 0 where nobody counts."""
        ...


@contextmanager
def without_collection() -> Iterator[None]:
    """Garbage stays meanwhile: to free an old graph is not allowed while a stream is being captured."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


@cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The side stream of all captures on a device: cuBLAS keeps a workspace (32 MiB) for each stream it ever ran on."""
    return torch.cuda.Stream(device)


class CudaCapture:
    """CUDA graphs out of one memory pool, captured on one side stream."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = capture_stream(device)
        self.pool = torch.cuda.graph_pool_handle()

    def capture(self, step: Callable[[], Result], runs: int = WARM_RUNS) -> tuple[Result, Callable[[], None]]:
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            for _ in range(runs):
                step()
        torch.cuda.current_stream(self.device).wait_stream(self.stream)
        graph = torch.cuda.CUDAGraph()
        with (
            without_collection(),
            torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"),
        ):
            outputs = step()
        return outputs, graph.replay

    def seconds(self, before: Callable[[], None], replay: Callable[[], None], repeats: int) -> float:
        times = []
        for _ in range(repeats):
            before()
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            replay()
            ended.record()
            ended.synchronize()
            times.append(began.elapsed_time(ended) / 1e3)
        return statistics.median(times)

    def free(self) -> int:
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self.device)[0]


@dataclass
class GraphCounters:
    """What capturing has cost, and what was captured. greedy, sampled: graphs of decode steps by kind; memory: bytes;
    seconds: warm-up and capture; timing: replays."""

    graphs: int = 0
    greedy: int = 0
    sampled: int = 0
    memory: int = 0
    seconds: float = 0.0
    timing: float = 0.0

    @contextmanager
    def counting(self, backend: CaptureBackend, graphs: int) -> Iterator[None]:
        """Count so many captures, with the time and memory that they take together. Before several of them garbage
        goes, which may hold older ones; to collect it takes longer than to capture one, for which somebody waits."""
        began = time.perf_counter()
        if graphs > 1:
            gc.collect()
        with without_collection():
            free = backend.free()
            yield
        self.graphs += graphs
        self.memory += max(free - backend.free(), 0)
        self.seconds += time.perf_counter() - began

    def __str__(self) -> str:
        kinds = f" ({self.greedy} greedy, {self.sampled} sampled)" if self.greedy + self.sampled else ""
        return f"{self.graphs} step graphs{kinds}, {self.memory / 2**20:.0f} MiB, captured in {self.seconds:.1f} s"


@dataclass
class Captured:
    """One captured step."""

    outputs: Outputs
    replay: Callable[[], None]


@dataclass(frozen=True)
class Key:
    """Which captured step: lanes N_bs, size over these lanes, and whether every request is greedy."""

    lanes: int
    shape: StepShape
    all_greedy: bool


@dataclass
class GraphRunner:
    """Replays the captured step that fits, capturing it first where it was never needed before.

    most: requests that may decode together. ran: all_greedy of the steps that ran, of any policy. kinds: of those that
    are prepared; the first of them are timed.
    """

    state: DeviceState
    models: Models
    policy: Policy
    most: int
    backend: CaptureBackend
    ran: set[bool] = field(default_factory=set)
    kinds: Sequence[bool] = GRAPH_KINDS["both"]
    counters: GraphCounters = field(default_factory=GraphCounters)

    def __post_init__(self) -> None:
        device = self.state.length.device
        self.sizes = buckets(self.most)
        self.work = Workspace.fixed(
            self.most, self.state.scratch_row, self.state.page_table.shape[1] * PAGE_SIZE, self._arrivals(), device
        )
        self._captured: dict[Key, Captured] = {}
        self._seconds: dict[Key, float] = {}
        self._loaded: list[int] = []

    def _arrivals(self) -> torch.Tensor | None:
        device = self.state.length.device
        if device.type != "cuda":
            return None
        decoders = [self.models.target.config.decoder]
        if self.models.drafter is not None:
            decoders.append(self.models.drafter.config.decoder)
        heads = max(decoder.num_heads for decoder in decoders)
        return arrival_counters(self.most, self.policy.width + 1, heads, device)

    def bucket(self, live: int) -> int:
        """N_bs, the smallest captured number of lanes that holds `live` requests."""
        return next(size for size in self.sizes if size >= live)

    @torch.inference_mode()
    def run(self, rows: Sequence[int], shape: StepShape, all_greedy: bool) -> Outputs:
        """One step of the requests on these state rows; shape as the policy gave it for their number. The first
        len(rows) lanes of the outputs are theirs, until the next step."""
        captured = self._find(self._key(len(rows), shape, all_greedy))
        self._load(rows)
        captured.replay()
        self.ran.add(all_greedy)
        return captured.outputs

    def prepare(self, kinds: Sequence[bool] = GRAPH_KINDS["both"], timed: bool = False) -> GraphCounters:
        """Capture every size the policy may ask for, largest bucket first, so that smaller ones find their memory.

        kinds: of the steps, but where some ran already (under another policy) those that did. What is not prepared is
        captured when it is first needed. timed: time replays of the first kind too.
        """
        self.kinds = sorted(self.ran, reverse=True) or kinds
        sizes = [(lanes, shape) for lanes in reversed(self.sizes) for shape in self.policy.shapes(lanes)]
        self._capture(self._key(lanes, shape, greedy) for lanes, shape in sizes for greedy in self.kinds)
        for lanes, shape in reversed(sizes) if timed else ():
            self.seconds(lanes, shape)
        logging.getLogger("dscale").info("%s", self.counters)
        return self.counters

    def seconds(self, live: int, shape: StepShape) -> float:
        """Seconds of the step of this shape, of the first kind, with every lane of its bucket live, timed once."""
        key = self._key(live, shape, self.kinds[0])
        if key not in self._seconds:
            self._seconds[key] = self._time(key)
        return self._seconds[key]

    def timed(self, live: int, shape: StepShape) -> bool:
        """Whether `seconds` of this step are known."""
        return self._key(live, shape, self.kinds[0]) in self._seconds

    def _key(self, live: int, shape: StepShape, all_greedy: bool) -> Key:
        lanes = self.bucket(live)
        return Key(lanes, shape.over(lanes), all_greedy)

    def _load(self, rows: Sequence[int]) -> None:
        if rows != self._loaded:
            self.work.load(rows, self.state.scratch_row)
            self._loaded = list(rows)

    def _find(self, key: Key) -> Captured:
        if key not in self._captured:
            self._capture([key])
        return self._captured[key]

    @torch.inference_mode()
    def _capture(self, keys: Iterable[Key]) -> None:
        """Capture what is missing of these while no lane is live, so that the warm-up moves nobody on."""
        missing = [key for key in dict.fromkeys(keys) if key not in self._captured]
        if not missing:
            return
        self._load([])
        with self.counters.counting(self.backend, len(missing)):
            for key in missing:
                self._captured[key] = self._capture_step(key)
        greedy = sum(key.all_greedy for key in missing)
        self.counters.greedy += greedy
        self.counters.sampled += len(missing) - greedy
        logging.getLogger("dscale").debug(
            "captured %s and %d more; in all %s", missing[0], len(missing) - 1, self.counters
        )

    def _capture_step(self, key: Key) -> Captured:
        """The other kind of a captured step differs in the draw alone: its kernels are compiled by one run."""
        work = self.work.view(key.lanes, key.all_greedy)
        twin = replace(key, all_greedy=not key.all_greedy)

        def step() -> Outputs:
            return Outputs.pack(decode_step(self.state, work, key.shape, self.models, self.policy))

        return Captured(*self.backend.capture(step, 1 if twin in self._captured else WARM_RUNS))

    @torch.inference_mode()
    def _time(self, key: Key) -> float:
        """Every lane live on the scratch row, which stands for a request of a typical length."""
        captured, began = self._find(key), time.perf_counter()
        scratch, state = self.state.scratch_row, self.state
        context = min(TYPICAL_CONTEXT, self.work.max_context // 2)
        self._load([])
        self.work.live.fill_(True)

        def rewind() -> None:
            state.length[scratch] = context

        try:
            return self.backend.seconds(rewind, captured.replay, TIMED_REPLAYS)
        finally:
            self.work.live.fill_(False)
            state.set_anchor(scratch, 0, 0, 1 << 40, False)
            self.counters.timing += time.perf_counter() - began
