"""The scheduler without a model: admission, chunks, growth, preemption, and no page lost under random events."""

from __future__ import annotations

import gc
import random
from dataclasses import astuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dscale.config import PAGE_SIZE, CacheConfig, InputError, SamplingParams
from dscale.engine.pages import PagePool, pages_for
from dscale.engine.request import FinishReason, Request, Status, StepRecord, StepRecords
from dscale.engine.scheduler import Scheduler

WIDTH = 8


def make(pages: int = 40, requests: int = 4, chunk: int = 32, prefix: bool = True) -> Scheduler:
    return Scheduler(PagePool(CacheConfig(pages, prefix)), requests, chunk, WIDTH)


def request(name: str, prompt: list[int], cap: int = 32) -> Request:
    return Request(name, prompt, SamplingParams(max_tokens=cap), seed=0, end_ids=(), cap=cap)


def run_plan(scheduler: Scheduler, emit: int = 1) -> list[Request]:
    """Play the worker: every chunk is prefilled, every decoding request emits `emit` tokens."""
    plan = scheduler.schedule()
    for chunk in plan.prefill:
        scheduler.commit(chunk.request, chunk.start + chunk.length)
    for one in plan.decode:
        tokens = [len(one.output) % 7] * min(emit, one.remaining)
        one.output.extend(tokens)
        if one.remaining == 0:
            scheduler.finish(one, FinishReason.LENGTH)
        else:
            scheduler.commit(one, one.length - 1)
    return plan.decode


def test_prompt_is_prefilled_in_chunks_up_to_its_last_token():
    scheduler = make(chunk=32)
    scheduler.add(request("a", list(range(80))))
    chunks = []
    for _ in range(3):
        plan = scheduler.schedule()
        chunks += [(chunk.start, chunk.length, bool(plan.decode)) for chunk in plan.prefill]
        for chunk in plan.prefill:
            scheduler.commit(chunk.request, chunk.start + chunk.length)
    assert chunks == [(0, 32, False), (32, 32, False), (64, 15, True)]


def test_requests_that_look_alike_are_told_apart():
    scheduler = make()
    first, second = request("a", [5]), request("a", [5])
    scheduler.add(first)
    scheduler.add(second)
    scheduler.schedule()
    scheduler.finish(second, FinishReason.ABORT)
    assert scheduler.running[0] is first
    assert (first.status, second.status) == (Status.PREFILL, Status.FINISHED)


@given(st.integers(0, 9), st.integers(0, 9), st.integers(0, 20), st.integers(0, 20))
def test_span_is_a_slice_of_all_tokens(prompt: int, output: int, start: int, stop: int):
    one = request("a", list(range(prompt)))
    one.output = list(range(100, 100 + output))
    assert one.span(start, stop) == one.tokens[start:stop]


def test_step_records_come_back_as_they_were_and_are_no_objects_meanwhile():
    rows = [StepRecord(3, 2, 8, 15), StepRecord(1, 0, 16, 15), StepRecord(16, 15, 16, 15)]
    steps, same = StepRecords(), StepRecords()
    for row in rows:
        steps.append(*astuple(row))
    for row in rows:
        same.append(*astuple(row))
    assert steps == same == rows
    assert steps != rows[:2]
    assert (list(steps), steps[-1], steps[1:], steps[5:]) == (rows, rows[2], rows[1:], [])
    with pytest.raises(IndexError):
        steps[3]
    assert not any(isinstance(one, StepRecord) for one in gc.get_referents(steps, vars(steps)))


def test_one_token_prompt_decodes_at_once():
    scheduler = make()
    scheduler.add(request("a", [5]))
    plan = scheduler.schedule()
    assert plan.prefill == []
    assert [one.id for one in plan.decode] == ["a"]


def test_pages_cover_the_block_ahead():
    scheduler = make()
    one = request("a", list(range(16)))
    scheduler.add(one)
    run_plan(scheduler)
    assert len(one.pages) == pages_for(16 + WIDTH)
    while one.length + WIDTH <= 2 * PAGE_SIZE:
        run_plan(scheduler)
    run_plan(scheduler)
    assert len(one.pages) == 3


def test_second_request_reuses_full_pages_of_the_first():
    scheduler = make()
    first = request("a", list(range(40)))
    scheduler.add(first)
    for _ in range(3):
        run_plan(scheduler)
    second = request("b", [*range(35), 99])
    scheduler.add(second)
    scheduler.schedule()
    assert second.cached_tokens == 32
    assert second.pages[:2] == first.pages[:2]
    assert second.pages[2] != first.pages[2]
    assert scheduler.prefix_hits == 32


def test_whole_prompt_cached_still_leaves_the_anchor():
    scheduler = make()
    scheduler.add(request("a", list(range(33))))
    run_plan(scheduler)
    run_plan(scheduler)
    again = request("b", list(range(32)))
    scheduler.add(again)
    scheduler.schedule()
    assert again.cached_tokens == 16  # 31 tokens may be cached: one full page; the 32nd is the anchor


def test_youngest_is_preempted_and_resumes_at_the_head():
    scheduler = make(pages=9, requests=4, prefix=False)
    old, young = request("old", list(range(40)), cap=64), request("young", list(range(40)), cap=64)
    scheduler.add(old)
    scheduler.add(young)
    for _ in range(80):
        run_plan(scheduler)
        if scheduler.preemptions:
            break
    assert young.preemptions == 1
    assert old.preemptions == 0
    assert young.status is Status.WAITING
    assert young.pages == []
    emitted = len(young.output)
    while scheduler.busy:
        run_plan(scheduler)
    assert len(young.output) == 64 > emitted
    assert scheduler.pool.held == 0


def test_request_that_never_fits_is_refused():
    scheduler = make(pages=4)
    with pytest.raises(InputError, match=r"request big: .* needs 7 pages; the cache has 3 \(48 tokens\)"):
        scheduler.add(request("big", list(range(64)), cap=32))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.booleans())
def test_random_events_leak_no_page_and_lose_no_request(seed: int, prefix: bool):
    rng = random.Random(seed)
    scheduler = make(pages=rng.randint(8, 24), requests=rng.randint(1, 5), chunk=rng.choice([5, 16, 64]), prefix=prefix)
    live: list[Request] = []
    finished = 0
    for number in range(60):
        if rng.random() < 0.4:
            prompt = [rng.randint(0, 1)] * rng.randint(1, 40)
            one = request(str(number), prompt, cap=rng.randint(1, 30))
            try:
                scheduler.add(one)
                live.append(one)
            except InputError:
                pass
        if live and rng.random() < 0.1:
            scheduler.finish(rng.choice(live), FinishReason.ABORT)
        run_plan(scheduler, emit=rng.randint(1, WIDTH))
        held = {page for one in scheduler.running for page in one.pages}
        assert scheduler.pool.held == len(held)
        for one in scheduler.running:
            assert len(one.pages) >= pages_for(one.committed)
        live = [one for one in live if one.status is not Status.FINISHED]
    while scheduler.busy:
        finished += len(run_plan(scheduler, emit=3))
    assert scheduler.pool.held == 0
    assert sorted(scheduler._rows) == list(range(scheduler.max_requests))
    assert all(one.status is Status.FINISHED for one in live)
