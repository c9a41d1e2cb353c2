"""Who runs in the next step: admission, chunked prefill, page growth ahead of need, preemption by recompute.

First come, first served. Pure Python over requests and pages; it is tested without a model.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from dscale.config import PAGE_SIZE, require
from dscale.engine.pages import PagePool, pages_for
from dscale.engine.request import FinishReason, Request, Status


@dataclass(frozen=True)
class Chunk:
    """A piece of prefill: tokens start … start+length-1 of a request go through the target."""

    request: Request
    start: int
    length: int

    @property
    def tokens(self) -> list[int]:
        """Its token ids."""
        return self.request.span(self.start, self.start + self.length)


@dataclass
class Plan:
    """One engine step: chunks to prefill, then requests to decode together."""

    prefill: list[Chunk] = field(default_factory=list)
    decode: list[Request] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        """True when there is nothing to do."""
        return not self.prefill and not self.decode


class Scheduler:
    """Holds waiting and running requests. lookahead: tokens a step may write past the committed length (W)."""

    def __init__(self, pool: PagePool, max_requests: int, max_prefill_tokens: int, lookahead: int) -> None:
        self.pool, self.lookahead = pool, lookahead
        self.max_requests, self.max_prefill_tokens = max_requests, max_prefill_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # in order of admission
        self._rows = list(range(max_requests - 1, -1, -1))
        self.preemptions = 0
        self.prefix_hits = 0  # tokens
        self.prefix_queries = 0  # tokens

    def add(self, request: Request) -> None:
        """Queue a request; refuse one that could never fit the cache even alone."""
        need = pages_for(len(request.prompt) + request.cap + self.lookahead)
        require(
            need <= self.pool.capacity,
            f"request {request.id}: prompt of {len(request.prompt)} plus max_tokens {request.cap} needs {need} pages; "
            f"the cache has {self.pool.capacity} ({self.pool.capacity * PAGE_SIZE} tokens)",
        )
        self.waiting.append(request)

    @property
    def busy(self) -> bool:
        """True while any request waits or runs."""
        return bool(self.waiting or self.running)

    def schedule(self) -> Plan | None:
        """The next step. Running requests come first; when pages run out the youngest gives up its own.

        A request in a step not read yet gets pages for that step's tokens too, two blocks ahead. None: pages ran out
        while such steps are in flight; read them and ask again, so that no request is preempted that may have ended.
        """
        if not self._grow_running():
            return None
        self._admit()
        plan = Plan()
        budget = self.max_prefill_tokens
        for request in self.running:
            if request.status is Status.PREFILL:
                length = min(request.prefill_left, budget)
                if length > 0:
                    plan.prefill.append(Chunk(request, request.committed, length))
                    budget -= length
                if request.prefill_left > length:
                    continue
            if request.remaining > request.in_flight:
                plan.decode.append(request)
        return plan

    def _grow_running(self) -> bool:
        """Give each running request pages for its next block, oldest first; False when steps in flight forbid it."""
        served = 0
        while served < len(self.running):
            request = self.running[served]
            reach = request.longest(self.lookahead) + self.lookahead
            if reach <= len(request.pages) * PAGE_SIZE or self._reserve(request, reach):
                served += 1
            elif any(one.in_flight for one in self.running):
                return False
            else:
                self._preempt(self.running[-1])
        return True

    def _reserve(self, request: Request, tokens: int) -> bool:
        fresh = self.pool.take(pages_for(tokens) - len(request.pages))
        if fresh is None:
            return False
        request.pages.extend(fresh)
        return True

    def _preempt(self, request: Request) -> None:
        """Take a request's pages; it waits at the head of the queue and is recomputed (cached pages may still hit)."""
        self._leave(request)
        request.status, request.committed = Status.WAITING, 0
        request.preemptions += 1
        self.preemptions += 1
        self.waiting.appendleft(request)

    def _admit(self) -> None:
        while self.waiting and self._rows:
            request = self.waiting[0]
            hits = self._match_prefix(request)
            reserve = int(self.pool.config.watermark * self.pool.capacity) if self.running else 0
            need = pages_for(request.length + self.lookahead) - len(hits)
            fresh = self.pool.take(need) if need + reserve <= self.pool.available else None
            if fresh is None:
                self.pool.release(hits)
                return
            self.waiting.popleft()
            request.pages = hits + fresh
            request.committed = request.cached_tokens = len(hits) * PAGE_SIZE
            request.row, request.bound = self._rows.pop(), False
            request.status = Status.PREFILL
            self.prefix_hits += request.committed
            self.prefix_queries += request.length - 1
            self.running.append(request)

    def _match_prefix(self, request: Request) -> list[int]:
        if not self.pool.config.prefix_caching or request.params.prompt_logprobs is not None:
            return []
        return self.pool.match(request.page_digests(request.length - 1))

    def commit(self, request: Request, committed: int) -> None:
        """Tokens up to `committed` have their keys in the cache; full pages among them become shareable."""
        before, request.committed = request.committed, committed
        if request.status is Status.PREFILL and request.prefill_left == 0:
            request.status = Status.DECODE
        full, known = committed // PAGE_SIZE, before // PAGE_SIZE
        if full > known and self.pool.config.prefix_caching:
            digests = request.page_digests(committed)
            for index in range(known, full):
                self.pool.publish(request.pages[index], digests[index])

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request wherever it stands and free what it holds."""
        if request.status is Status.FINISHED:
            return
        if request in self.running:
            self._leave(request)
        else:
            self.waiting.remove(request)
        request.status, request.finish_reason = Status.FINISHED, reason

    def _leave(self, request: Request) -> None:
        self.running.remove(request)
        self.pool.release(request.pages)
        self._rows.append(request.row)
        request.pages, request.row = [], -1
