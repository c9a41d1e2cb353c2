"""Results read one step late: the same tokens, the same ends, the same counts as when every step is read at once."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from dscale.config import CacheConfig, InputError, SamplingParams
from dscale.engine.llm import LLM
from dscale.engine.pages import PagePool, pages_for
from dscale.engine.request import FinishReason, Request, Status
from dscale.engine.scheduler import Scheduler
from tests.engine.test_lossless import GREEDY, POLICIES, SEEDED, engine, prompts, reference, tokens


class Letters:
    """A tokenizer whose token i is the i-th letter."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join("abcdefgh"[token] for token in ids)


def spelling(llm: LLM) -> LLM:
    llm.engine.tokenizer = Letters()  # type: ignore[assignment]
    return llm


def requests_of(llm: LLM, rows: list[list[int]], params: SamplingParams) -> list[Request]:
    """Run all rows to their ends through `step`."""
    made = [llm.engine.add(str(number), row, params, 11) for number, row in enumerate(rows)]
    while llm.engine.busy:
        llm.engine.step()
    return made


def ends(requests: list[Request]) -> list[tuple[Any, ...]]:
    return [(one.output, one.finish_reason, one.stop_reason, one.text and one.text.text) for one in requests]


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "seeded"])
@pytest.mark.parametrize("policy", ["off", *POLICIES])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_policy_changes_no_token(family: str, policy: str, sampled: bool) -> None:
    llm = engine(family, policy, lag=1)
    assert tokens(llm, prompts(8), SEEDED if sampled else GREEDY) == reference(family, sampled)
    assert llm.engine.scheduler.pool.held == 0


@pytest.mark.parametrize("policy", ["off", "full", "dvl", "confidence", "auto"])
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "seeded"])
def test_arrivals_aborts_preemption_and_prefix_hits_change_no_token(policy: str, sampled: bool) -> None:
    params = SEEDED if sampled else GREEDY
    llm = engine("llama", policy, num_pages=14, max_prefill_tokens=17, lag=1)
    rows, expected, rng = prompts(8), reference("llama", sampled), random.Random(5)
    order = [rng.randrange(8) for _ in range(24)]
    made: list[tuple[int, Request]] = []
    while order or llm.engine.busy:
        if order and rng.random() < 0.5:
            which = order.pop()
            made.append((which, llm.engine.add(f"r{len(made)}", rows[which], params, 11)))
        if made and rng.random() < 0.05:
            llm.engine.abort(rng.choice(made)[1].id)
        llm.engine.step()
    assert sum(one.finish_reason is FinishReason.LENGTH for _, one in made) >= 12
    assert any(one.finish_reason is FinishReason.ABORT for _, one in made)
    for which, one in made:
        assert one.status is Status.FINISHED
        assert one.output == expected[which][: len(one.output)]
        assert one.finish_reason is FinishReason.ABORT or len(one.output) == 40
    assert llm.engine.scheduler.preemptions > 0
    assert llm.engine.scheduler.prefix_hits > 0
    assert llm.engine.scheduler.pool.held == 0
    assert sorted(llm.engine.scheduler._rows) == [0, 1, 2, 3]


@pytest.mark.parametrize("policy", ["off", "full", "dvl"])
def test_ends_and_counts_are_those_of_steps_read_at_once(policy: str) -> None:
    """End tokens, stop strings and caps inside blocks; nothing of the surplus step is counted."""
    params = replace(SEEDED, temperature=3.0, stop_token_ids=[3], stop=["cce", "eebb"], max_tokens=17)
    runs = []
    for lag in (0, 1):
        llm = spelling(engine("llama", policy, lag=lag))
        made = requests_of(llm, prompts(12), params)
        runs.append((llm, made))
    (plain, at_once), (late, lagged) = runs
    assert ends(lagged) == ends(at_once)
    assert {one.finish_reason for one in lagged} == {FinishReason.STOP, FinishReason.LENGTH}
    assert {one.stop_reason for one in lagged} >= {3, "eebb", None}
    assert sum(len(one.output) for one in lagged) == late.engine.counters.emitted == plain.engine.counters.emitted
    if policy != "dvl":  # its budget is shared with whoever runs beside
        assert late.engine.counters.request_steps == plain.engine.counters.request_steps
        assert [one.steps for one in lagged] == [one.steps for one in at_once]
    assert late.engine.scheduler.pool.held == 0


def test_requests_that_need_the_host_are_exact_beside_plain_ones() -> None:
    edited = SamplingParams(
        temperature=0.9, seed=4, max_tokens=20, presence_penalty=0.6, min_tokens=6, stop_token_ids=[3], logprobs=2
    )
    scored = replace(SEEDED, logprobs=1)
    several = replace(SEEDED, n=3)
    mixed = [edited, SEEDED, scored, several, GREEDY, edited, SEEDED, replace(GREEDY, prompt_logprobs=1)]
    outputs = []
    for lag in (0, 1):
        made = engine("llama", "full", lag=lag).generate(prompt_token_ids=prompts(8), sampling_params=mixed)
        outputs.append([[(one.token_ids, one.finish_reason, one.logprobs) for one in row.outputs] for row in made])
    assert [[one[:2] for one in row] for row in outputs[0]] == [[one[:2] for one in row] for row in outputs[1]]
    for before, after in zip(outputs[0], outputs[1], strict=True):
        for one, other in zip(before, after, strict=True):
            assert [p.logprob for p in one[2] or ()] == pytest.approx([p.logprob for p in other[2] or ()], abs=1e-4)
    assert len(outputs[1][3]) == 3


def test_a_step_is_in_flight_and_an_ended_request_takes_no_rows_in_it() -> None:
    llm = engine("llama", "full", lag=1)
    worker, slots = llm.engine.worker, []
    collect = worker.collect

    def spy(launched):
        decoded = collect(launched)
        slots.append((len(launched.requests), [int(k) for k in launched.result.slots]))
        return decoded

    worker.collect = spy
    params = replace(SEEDED, temperature=3.0, stop_token_ids=[3], max_tokens=30)
    made = requests_of(llm, prompts(12), params)
    assert any(one.finish_reason is FinishReason.STOP for one in made)
    ended = [k for _, ks in slots for k in ks if k == 0]
    assert ended, "a request that met its end token was in one more step, without rows"
    assert all(k in (0, 8) for _, ks in slots for k in ks)


def test_a_policy_hears_for_how_many_requests_a_step_was_launched() -> None:
    """Its time is that of all of them, also where one has ended meanwhile."""
    llm = engine("llama", "full", lag=1)
    worker, launched, outcomes = llm.engine.worker, [], []
    collect, learn = worker.collect, worker.learn
    worker.collect = lambda step: (launched.append(len(step.requests)), collect(step))[1]
    worker.learn = lambda outcome: (outcomes.append(outcome), learn(outcome))[1]
    requests_of(llm, prompts(12), replace(SEEDED, temperature=3.0, stop_token_ids=[3], max_tokens=30))
    assert [outcome.live for outcome in outcomes] == launched
    assert any(len(outcome.slots) < outcome.live for outcome in outcomes)


def test_the_page_table_is_written_once_a_step_at_most() -> None:
    llm = engine("llama", "full", lag=1)
    worker, most, both = llm.engine.worker, 0, 0
    written: list[int] = []
    place = worker.place
    worker.place = lambda *arguments: (written.append(1), place(*arguments))[1]
    for number, row in enumerate(prompts(12)):
        llm.engine.add(str(number), row, GREEDY, 11)
    prefill, launch = worker.prefill, worker.launch
    done: list[str] = []
    worker.prefill = lambda *arguments: (done.append("prefill"), prefill(*arguments))[1]
    worker.launch = lambda *arguments: (done.append("launch"), launch(*arguments))[1]
    while llm.engine.busy:
        written.clear()
        done.clear()
        llm.engine.step()
        most = max(most, len(written))
        both += done == ["prefill", "launch"]
    assert most == 1
    assert both > 1


def test_abort_and_stream_leave_no_step_behind() -> None:
    llm = spelling(engine("llama", "full", lag=1))
    pieces = llm.stream(prompts(1)[0], GREEDY)
    assert next(pieces)
    pieces.close()
    assert not llm.engine.busy
    assert llm.engine.scheduler.pool.held == 0
    assert tokens(llm, prompts(8), GREEDY) == reference("llama", False)
    text = "".join(llm.stream(prompts(1)[0], GREEDY))
    assert text == Letters().decode(reference("llama", False)[0])


def scheduler_with(pages: int, requests: int, width: int = 8) -> tuple[Scheduler, list[Request]]:
    scheduler = Scheduler(PagePool(CacheConfig(pages, False)), 4, 64, width)
    made = [
        Request(str(number), [1] * 16, SamplingParams(max_tokens=64), seed=0, end_ids=(), cap=64)
        for number in range(requests)
    ]
    for one in made:
        scheduler.add(one)
    plan = scheduler.schedule()
    for chunk in plan.prefill:
        scheduler.commit(chunk.request, chunk.start + chunk.length)
    return scheduler, made


def test_pages_reach_two_blocks_ahead_of_what_is_known() -> None:
    scheduler, (one,) = scheduler_with(20, 1)
    assert len(one.pages) == pages_for(16 + 8)
    one.in_flight = 1
    one.output = [2] * 10
    scheduler.commit(one, one.length - 1)
    assert scheduler.schedule().decode == [one]
    assert len(one.pages) == pages_for(26 + 8 + 8)
    one.output = [2] * 63  # one token is left to it, and the step in flight emits it
    scheduler.commit(one, one.length - 1)
    assert scheduler.schedule().decode == []
    assert len(one.pages) == pages_for(16 + 64 + 8)


def test_nothing_is_preempted_while_a_step_is_in_flight() -> None:
    scheduler, (old, young) = scheduler_with(8, 2)
    for one in (old, young):
        one.output = [2] * 24
        scheduler.commit(one, one.length - 1)
        one.in_flight = 1
    assert scheduler.schedule() is None
    assert scheduler.preemptions == 0
    old.in_flight = young.in_flight = 0
    assert scheduler.schedule().decode == [old, young]  # there were pages for what was known
    for one in (old, young):
        one.output = [2] * 33
        scheduler.commit(one, one.length - 1)
    assert scheduler.schedule().decode == [old]
    assert scheduler.preemptions == 1
    assert scheduler.pool.held == len(old.pages)


def test_lag_is_checked() -> None:
    with pytest.raises(InputError, match="lag: 2; allowed are 0 and 1"):
        engine("llama", "off", lag=2)
