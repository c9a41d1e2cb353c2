"""The engine loop on scripted messages, in this process: what it tells of requests, and when."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dscale.config import SamplingParams
from dscale.engine.graphs import GraphCounters
from dscale.engine.llm import LLM
from dscale.serve.client import join
from dscale.serve.engine_process import EngineLoop, about
from dscale.serve.link import Closed
from dscale.serve.messages import Abort, Delta, Ready, Refused, Snapshot, Stop, Submit, Switch, Switched

PROMPT = (5, 6, 7)
Script = dict[int, list[object]]


class ScriptedLink:
    """Hands out the messages of turn 0, 1, …; counts the turns on which the loop would have slept for ever."""

    def __init__(self, script: Script) -> None:
        self.script, self.turn, self.slept = script, 0, 0
        self.sent: list[Any] = []
        self.batches: list[list[Any]] = []

    def receive(self, timeout: float | None) -> list[Any]:
        if timeout is None:
            self.slept += 1
            if self.turn > max(self.script):
                raise Closed
            self.turn = min(turn for turn in self.script if turn >= self.turn)
        messages = self.script.get(self.turn, [])
        self.turn += 1
        return messages

    def send(self, messages: list[object]) -> None:
        self.sent += messages
        self.batches.append(messages)

    def of(self, kind: type) -> list[Any]:
        return [message for message in self.sent if isinstance(message, kind)]

    def whole(self, id: str) -> Delta:
        """All deltas of a request as one."""
        first, *rest = [delta for delta in self.of(Delta) if delta.id == id]
        for delta in rest:
            first = join(first, delta)
        return first


Play = Callable[..., ScriptedLink]


@pytest.fixture
def build(folders: dict[str, Path]) -> Callable[..., LLM]:
    """An LLM on the tiny pair."""

    def make(**options: Any) -> LLM:
        pair = {"drafter": str(folders["drafter"]), "predictor": str(folders["predictor"])}
        options = {**pair, "policy": "full", "dtype": "float32", "device": "cpu", "max_requests": 4, **options}
        return LLM(str(folders["target"]), **options)

    return make


@pytest.fixture
def play(build: Callable[..., LLM]) -> Play:
    """Runs a script on a tiny engine until the loop would sleep with nothing to come."""

    def go(script: Script, max_waiting: int = 64, **options: Any) -> ScriptedLink:
        link = ScriptedLink(script)
        with suppress(Closed):  # the script ran out while the loop waited
            EngineLoop(build(**options), link, max_waiting).run()
        return link

    return go


def greedy(tokens: int = 24, **more: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, **more)


def test_what_was_captured_is_told_at_the_start(build: Callable[..., LLM]) -> None:
    llm = build()
    assert about(llm)["captured"] is None
    llm.engine.worker.graphs = SimpleNamespace(counters=GraphCounters(6, 4, 2, 1 << 20, 1.5))  # type: ignore[assignment]
    kinds = {"graphs": 6, "greedy": 4, "sampled": 2}
    assert about(llm)["captured"] == kinds | {"memory": 1 << 20, "seconds": 1.5, "timing": 0.0}


def test_what_steps_add_is_told_together_where_a_request_asks_for_it(play: Play) -> None:
    every = play({0: [Submit("a", PROMPT, greedy(40), 0)]}).of(Delta)
    rarely = play({0: [Submit("a", PROMPT, greedy(40), 0, math.inf)]}).of(Delta)
    assert len(every) > 3
    assert len(rarely) == 2  # the first and the last
    assert [token for one in rarely for token in one.token_ids] == [token for one in every for token in one.token_ids]
    assert "".join(one.text for one in rarely) == "".join(one.text for one in every)
    assert rarely[-1].usage == every[-1].usage
    assert [step for one in rarely for step in one.steps] == [step for one in every for step in one.steps]


@pytest.mark.parametrize(("streams", "running", "tokens"), [(1, 4, 3), (4, 4, 10), (6, 1, 3)])
def test_streams_that_run_share_the_events_of_a_cpu(
    build: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch, streams: int, running: int, tokens: int
) -> None:
    llm, now = build(policy="off", max_requests=running), [0.0]
    step = llm.engine.step

    def slow_step() -> Any:
        now[0] += 0.0041  # 100 events a second: one in 10 ms, so each of four streams one in 40 ms
        return step()

    monkeypatch.setattr(llm.engine, "step", slow_step)
    monkeypatch.setattr("dscale.serve.engine_process.time", SimpleNamespace(monotonic=lambda: now[0]))
    link = ScriptedLink({0: [Submit(str(number), PROMPT, greedy(40), 0, None) for number in range(streams)]})
    with suppress(Closed):
        EngineLoop(llm, link, 64).run()
    for number in range(streams):
        first, *middle, _last = [len(one.token_ids) for one in link.of(Delta) if one.id == str(number)]
        assert first == 1
        assert set(middle) == {tokens}


def test_deltas_add_up_to_the_offline_output(play: Play, build: Callable[..., LLM]):
    params = greedy(logprobs=2, prompt_logprobs=1)
    (want,) = build().generate(sampling_params=params, prompt_token_ids=[PROMPT])
    link = play({0: [Submit("a", PROMPT, params, 0)]})
    got, one = link.whole("a"), want.outputs[0]
    assert isinstance(link.sent[0], Ready)
    assert (got.text, got.token_ids, got.finish_reason) == (one.text, one.token_ids, "length")
    assert got.logprobs == one.logprobs
    assert got.prompt_logprobs == want.prompt_logprobs
    assert one.metrics is not None
    assert got.steps == one.metrics.records
    usage = got.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.steps) == (3, 24, len(one.metrics.records))
    assert (usage.drafted, usage.accepted) == (one.metrics.drafted, one.metrics.accepted)
    assert (usage.slots, usage.trimmed) == (one.metrics.slots, 0)
    assert len([delta for delta in link.of(Delta) if delta.token_ids]) == usage.steps  # one a step


@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_are_held_back_and_cut_as_offline(play: Play, build: Callable[..., LLM], include: bool):
    llm = build()
    free = llm.generate(sampling_params=greedy(), prompt_token_ids=[PROMPT])[0].outputs[0].text
    words = free.split()
    stop = " ".join(words[10:12])[:-1]  # begins inside one token and ends inside another
    params = greedy(stop=(stop,), include_stop_str_in_output=include)
    want = llm.generate(sampling_params=params, prompt_token_ids=[PROMPT])[0].outputs[0]
    link = play({0: [Submit("a", PROMPT, params, 0)]}, policy="off")
    got = link.whole("a")
    assert (got.text, got.token_ids) == (want.text, want.token_ids)
    assert (got.finish_reason, got.stop_reason) == ("stop", stop)
    assert got.text.endswith(stop) == include
    shown = ""
    for delta in link.of(Delta)[:-1]:  # nothing is shown that a stop string could still take back
        shown += delta.text
        assert got.text.startswith(shown)


def test_abort_frees_every_page_and_says_so(play: Play):
    link = play(
        {0: [Submit("a", PROMPT, greedy(90), 0), Submit("b", PROMPT, greedy(90), 1)], 4: [Abort("a"), Abort("never")],
         6: [Abort("b")]}, prefix_caching=False,
    )  # fmt: skip
    assert link.whole("a").finish_reason == "abort"
    assert 0 < len(link.whole("a").token_ids) < 90
    last = link.of(Snapshot)[-1]
    assert (last.running, last.waiting, last.pages_used) == (0, 0, 0)
    assert link.slept == 1  # when all was done: no turn without work


def test_requests_over_the_limit_are_refused_and_the_others_served(play: Play):
    submits = [Submit(str(i), PROMPT, greedy(4), i) for i in range(9)]
    link = play({0: submits}, max_waiting=2, max_requests=4)
    assert [(one.id, one.kind) for one in link.of(Refused)] == [(str(i), "overloaded") for i in (6, 7, 8)]
    assert all(link.whole(str(i)).finish_reason == "length" for i in range(6))


@pytest.mark.parametrize(
    ("prompt", "params", "seed", "words"),
    [
        ((), greedy(4), 0, "empty"),
        ((5, 64), greedy(4), 0, "[0, 63]"),
        ((1.5,), greedy(4), 0, "float"),
        ((5,) * 128, greedy(4), 0, "context length is 128"),
        ((5,), greedy(4), 1 << 63, "64 bits"),
        ((5,), greedy(4, stop_token_ids=(1 << 70,)), 0, "stop_token_ids"),
        ((5,), greedy(4, logit_bias={99: 1.0}), 0, "logit_bias"),
    ],
)
def test_invalid_requests_are_refused_and_the_engine_lives_on(play: Play, prompt, params, seed, words):
    link = play({0: [Submit("bad", prompt, params, seed), Submit("good", PROMPT, greedy(4), 0)]})
    (refused,) = link.of(Refused)
    assert (refused.id, refused.kind) == ("bad", "invalid")
    assert words in refused.message
    assert "bad" not in refused.message
    assert link.whole("good").finish_reason == "length"


def test_extreme_parameters_do_not_end_the_engine(play: Play):
    """Each of these overflows some number of the device state when it is passed on as it is."""
    extremes: list[dict[str, Any]] = [
        {"temperature": 1e4, "top_k": 1 << 70}, {"temperature": 1e-46, "top_p": 1e-300}, {"temperature": 2e-5},
        {"repetition_penalty": 1e300}, {"logit_bias": {3: float("inf"), 4: float("-inf")}}, {"max_tokens": 1 << 70},
        {"logit_bias": {i: float("-inf") for i in range(64)}}, {"repetition_penalty": 1e-300, "min_p": 1.0},
    ]  # fmt: skip
    submits = [
        Submit(str(i), PROMPT, SamplingParams(**{"max_tokens": 8, **more}), (-1) ** i << 62)
        for i, more in enumerate(extremes)
    ]
    link = play({0: submits}, policy="dvl")
    ended = {delta.id: delta.finish_reason for delta in link.of(Delta) if delta.finish_reason}
    assert len(ended) + len(link.of(Refused)) == len(extremes)
    assert set(ended.values()) <= {"stop", "length"}


def test_stop_finishes_what_was_accepted_and_refuses_the_rest(play: Play):
    script: Script = {0: [Submit(str(i), PROMPT, greedy(30), i) for i in range(6)], 2: [Stop(60.0)]}
    script[3] = [Submit("late", PROMPT, greedy(4), 0)]
    link = play(script)
    assert [(one.id, one.kind) for one in link.of(Refused)] == [("late", "shutdown")]
    assert [link.whole(str(i)).usage.completion_tokens for i in range(6)] == [30] * 6
    assert link.of(Snapshot)[-1].running == 0


def test_stop_aborts_what_takes_too_long(play: Play):
    link = play({0: [Submit(str(i), PROMPT, greedy(90), i) for i in range(6)], 3: [Stop(0.0)]})
    assert {link.whole(str(i)).finish_reason for i in range(6)} == {"abort"}
    assert link.of(Snapshot)[-1].pages_used == 0


def test_policies_switch_while_requests_run_and_no_token_changes(play: Play, build: Callable[..., LLM]):
    params = [greedy(90), SamplingParams(temperature=1.0, max_tokens=90, ignore_eos=True, seed=3)]
    want = build(policy="off").generate(sampling_params=params, prompt_token_ids=[PROMPT, PROMPT])
    order = ["off", "fixed:3", "dvl", "confidence", "dvl:seeded", "auto", "full"]
    script: Script = {4 * turn: [Switch(policy, slots=3.0)] for turn, policy in enumerate(order, start=1)}
    script[0] = [Submit(str(i), PROMPT, one, i * 3) for i, one in enumerate(params)]
    link = play(script)
    assert [link.whole(str(i)).token_ids for i in range(2)] == [one.outputs[0].token_ids for one in want]
    assert [switched.policy for switched in link.of(Switched)] == order
    assert not any(switched.error for switched in link.of(Switched))
    assert {switched.slots for switched in link.of(Switched)} == {3}
    slots = [step.slots for step in link.whole("0").steps]
    assert {1, 3, 6} <= set(slots)  # off, fixed:3, full of a block of 6


def test_impossible_switches_are_answered_and_change_nothing(play: Play):
    wrong = [
        Switch("sometimes"),
        Switch("fixed:7"),
        Switch("full", width=7),
        Switch("dvl", width=4),
        Switch("dvl", 0.5),
    ]
    link = play({0: wrong})
    answers = link.of(Switched)
    assert [(answer.policy, answer.slots) for answer in answers] == [("full", 8)] * 5
    for answer, word in zip(answers, ("known", "6 rows", "at most 6", "width 6", "at least 1"), strict=True):
        assert word in answer.error
    (alone,) = play({0: [Switch("full")]}, policy="off").of(Switched)
    assert "drafter" in alone.error


def test_snapshots_count_by_position(play: Play):
    params = SamplingParams(temperature=1.0, max_tokens=40, ignore_eos=True)
    submits = [Submit(str(i), PROMPT, params, i) for i in range(4)]
    link = play({0: submits}, policy="dvl", slots=3.0)
    last = link.of(Snapshot)[-1]
    steps = [step for i in range(4) for step in link.whole(str(i)).steps]
    for position in range(1, 6):
        assert last.drafted_at[position - 1] == sum(step.drafted >= position for step in steps)
        assert last.verified_at[position - 1] == sum(step.slots > position for step in steps)
        assert last.accepted_at[position - 1] == sum(step.accepted >= position for step in steps)
    assert last.counters["emitted"] == 160
    assert last.counters["trimmed"] == sum(step.drafted - step.slots + 1 for step in steps) > 0
    assert last.counters["slots"] == sum(step.slots for step in steps)
    assert len(last.predicted) == 5
    assert 0 < last.predicted[0] <= last.verified_at[0]
    assert last.calibrated[0] <= last.accepted_at[0]
    assert sum(len(shot.step_seconds) for shot in link.of(Snapshot)) == last.counters["steps"]
    assert {lane.id for lane in last.lanes} <= {"0", "1", "2", "3"}
    assert all(1 <= lane.slots <= 6 and lane.drafted == 5 for lane in last.lanes)
    assert last.policy == "dvl"


def test_idle_loop_sleeps_on_the_pipe(play: Play):
    link = play({0: [Submit("a", PROMPT, greedy(4), 0)], 50: [Submit("b", PROMPT, greedy(4), 0)]})
    assert link.slept == 2  # between the two and after the second
    assert [shot.running for shot in link.of(Snapshot) if shot.running == 0] == [0, 0]
