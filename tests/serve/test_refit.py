"""Refits while the engine serves: what they learn from, what they put in force, and that text stays as it is."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("prometheus_client", reason="needs the extra `serve`")

from dscale.config import Grammar, InputError, SamplingParams
from dscale.engine.llm import LLM
from dscale.serve.client import Client
from dscale.serve.engine_process import EngineLoop
from dscale.serve.messages import Delta, RefitOptions, Refitted, Snapshot, Stop, Submit, Switch
from dscale.serve.refit import Refitter, refitting_recorder
from dscale.speculation.confidence import ConfidenceModel
from dscale.speculation.policies import ConfidenceScorer
from dscale.speculation.predictor import Predictor, PredictorConfig
from dscale.train.refit import Refit, RefitJob, Verdict, refit
from dscale.train.refit_process import RefitFailed
from tests.engine.pairs import tiny_drafter, tiny_target
from tests.serve.inprocess import tiny_llm

SOON = RefitOptions(every=0.0, min_records=200, keep=4000)
PROMPTS = [tuple((index >> bit) % 4 + 1 for bit in range(5)) for index in range(0, 64, 3)]
PARAMS = SamplingParams(temperature=1.0, seed=5, max_tokens=40)


class Here:
    """In place of RefitProcess: the job at once, in the caller's thread, and what it returns changed by `twist`."""

    def __init__(self, twist: Any = lambda result: result) -> None:
        self.twist = twist
        self.jobs: list[RefitJob] = []

    def run(self, job: RefitJob) -> Refit:
        self.jobs.append(job)
        return self.twist(refit(job))

    def close(self) -> None:
        return


def random_predictor(width: int = 8, seed: int = 0) -> Predictor:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made = Predictor(PredictorConfig(width, "d", ("confidence", "context"), hidden_units=16))
    return made.eval().requires_grad_(False)


def engine(policy: str = "dvl", predictor: Predictor | None = None, **options: Any) -> LLM:
    target = tiny_target("llama")
    known = {"dtype": "float32", "device": "cpu", "num_pages": 64, "max_requests": 4, "slots": 4.0, **options}
    found = random_predictor() if predictor is None else predictor
    return LLM(target, tiny_drafter(target), found, policy, recorder=refitting_recorder(), **known)


def serve(llm: LLM, refitter: Refitter, prompts: list[tuple[int, ...]] = PROMPTS, params: Any = PARAMS) -> list[Any]:
    """Run the prompts as the loop does; records of the refits that ended meanwhile, the last waited for."""
    made = params if isinstance(params, list) else [params] * len(prompts)
    for number, (prompt, one) in enumerate(zip(prompts, made, strict=True)):
        llm.engine.add(f"{number}", list(prompt), one, 7)
    records = []
    while llm.engine.busy or refitter.running:
        if llm.engine.busy:
            llm.engine.step()
        else:
            time.sleep(0.005)  # the fit runs in a thread here, and a loop that spins would starve it
        records += [one.record for one in refitter.turn()]
    return records


def refitting(llm: LLM, options: RefitOptions = SOON, process: Any = None) -> Refitter:
    refitter = Refitter(llm, options)
    refitter.process = process or Here()
    return refitter


def test_a_better_predictor_takes_the_place_of_a_random_one():
    llm = engine()
    refitter = refitting(llm)
    served = llm.load_predictor()
    assert served is not None
    before, places = served.first.weight.clone(), [one.data_ptr() for one in served.parameters()]
    records = serve(llm, refitter)
    first = records[0]
    assert first["predictor"]["outcome"] == "accepted"
    assert first["predictor"]["new"]["log_loss"] < first["predictor"]["old"]["log_loss"]
    assert first["version"] == 1
    assert sum(first["records"].values()) >= 100
    assert not torch.equal(served.first.weight, before)
    assert [one.data_ptr() for one in served.parameters()] == places  # captured steps read these
    state = refitter.now()
    assert state.version == sum(one["predictor"]["outcome"] == "accepted" for one in records)
    last = records[-1]["predictor"]
    assert state.log_loss["predictor"]["new"] == pytest.approx(last["new"]["log_loss"], abs=1e-5)
    assert state.outcomes["predictor"]["accepted"] + state.outcomes["predictor"]["rejected"] == len(records)


def test_each_refit_starts_from_what_the_last_one_brought():
    llm, process = engine(), Here()
    refitter = refitting(llm, process=process)
    serve(llm, refitter)
    serve(llm, refitter, PROMPTS[::-1])
    assert len(process.jobs) >= 2
    served = llm.load_predictor()
    host = refitter._host
    assert served is not None
    assert host is not None
    for name, value in served.state_dict().items():
        assert torch.equal(value, host.state_dict()[name])


def test_a_worse_fit_changes_nothing():
    def worse(result: Refit) -> Refit:
        verdict = result.predictor
        assert verdict is not None
        return Refit(Verdict(verdict.new, verdict.old, None), None, result.records, result.prompts, 0.1)

    llm = engine()
    refitter = refitting(llm, process=Here(worse))
    served = llm.load_predictor()
    assert served is not None
    before = {name: value.clone() for name, value in served.state_dict().items()}
    records = serve(llm, refitter)
    assert {one["predictor"]["outcome"] for one in records} == {"rejected"}
    assert records[0]["predictor"]["new"]["log_loss"] > records[0]["predictor"]["old"]["log_loss"]
    assert all(torch.equal(value, before[name]) for name, value in served.state_dict().items())
    assert refitter.now().version == 0


def test_penalties_bias_grammar_and_minimum_lengths_teach_nothing():
    edited: list[dict[str, Any]] = [
        {"presence_penalty": 0.5}, {"frequency_penalty": 0.5}, {"repetition_penalty": 1.2}, {"logit_bias": {7: 2.0}},
        {"min_tokens": 3}, {"grammar": Grammar("regex", "[a-z]{12}"), "stop_token_ids": [256]},
    ]  # fmt: skip
    llm = tiny_llm("full", recorder=refitting_recorder())
    refitter = refitting(llm)
    plain = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    params = [SamplingParams(temperature=0.0, max_tokens=24, **one) for one in edited] + [plain]
    prompts = [(60 + number, 61, 62) for number in range(len(params))]
    requests = [llm.engine.add(str(n), list(p), q, 0) for n, (p, q) in enumerate(zip(prompts, params, strict=True))]
    while llm.engine.busy:
        llm.engine.step()
    assert refitter.traces.prompts == 1
    assert len(refitter.traces) == len(requests[-1].steps) > 0
    assert refitter.recorder.skipped == {"edited logits": sum(len(one.steps) for one in requests[:-1])}


def test_text_is_that_of_an_engine_without_refits_across_swaps():
    want = engine().generate(prompt_token_ids=PROMPTS, sampling_params=PARAMS)
    llm = engine()
    refitter = refitting(llm, RefitOptions(every=0.0, min_records=100, keep=800))
    seen: dict[int, int] = {}  # swaps by the number of requests that ran through one
    made = [llm.engine.add(str(n), list(prompt), PARAMS, 5) for n, prompt in enumerate(PROMPTS)]
    while llm.engine.busy:
        llm.engine.step()
        before = refitter.state.version
        while refitter.running:
            time.sleep(0.001)
            if refitter.turn():
                break
        else:
            refitter.turn()
        if refitter.state.version > before:
            running = sum(bool(one.output) for one in llm.engine.scheduler.running)
            seen[running] = seen.get(running, 0) + 1
    assert max(seen) >= 2, "requests were in the middle of their answers"
    assert [one.output for one in made] == [one.outputs[0].token_ids for one in want]


@pytest.mark.parametrize("reason", [RefitFailed("its process ended with code -9"), ZeroDivisionError("planted")])
def test_a_refit_that_fails_is_told_and_the_next_one_begins(reason: Exception):
    fail = [True]

    def twist(result: Refit) -> Refit:
        if fail.pop() if fail else False:
            raise reason
        return result

    llm = engine()
    refitter = refitting(llm, process=Here(twist))
    records = serve(llm, refitter) + serve(llm, refitter, PROMPTS[::-1])
    assert records[0]["outcome"] == "failed"
    assert str(reason) in records[0]["reason"]
    assert records[1]["predictor"]["outcome"] == "accepted"
    assert refitter.now().outcomes["refit"] == {"failed": 1}


def test_weights_of_another_shape_are_a_failure_and_change_nothing():
    def twist(result: Refit) -> Refit:
        verdict = result.predictor
        assert verdict is not None
        stranger = dict(random_predictor(6).state_dict())
        return Refit(Verdict(verdict.old, verdict.new, stranger), None, result.records, result.prompts, 0.1)

    llm = engine()
    refitter = refitting(llm, process=Here(twist))
    records = serve(llm, refitter)
    assert {one["outcome"] for one in records} == {"failed"}
    assert "cannot replace" in records[0]["reason"]
    assert refitter.now().version == 0


def test_a_restart_goes_on_from_the_folder(tmp_path: Path):
    options = RefitOptions(every=0.0, min_records=100, keep=4000, folder=str(tmp_path / "refits"))
    llm = engine()
    refitter = refitting(llm, options)
    records = serve(llm, refitter)
    version, served = records[-1]["version"], llm.load_predictor()
    assert version >= 1
    assert not any("not_kept" in one for one in records)
    again = engine()
    restarted = refitting(again, options)
    assert restarted.now().version == version
    found = again.load_predictor()
    assert served is not None
    assert found is not None
    assert all(torch.equal(value, served.state_dict()[name]) for name, value in found.state_dict().items())
    other = engine(predictor=random_predictor(seed=9))
    assert refitting(other, options).now().version == 0  # another predictor was given: it serves


def test_a_full_disk_is_told_and_the_new_predictor_serves(tmp_path: Path):
    (tmp_path / "refits").write_text("a file where a folder should be")
    llm = engine()
    refitter = refitting(llm, RefitOptions(every=0.0, min_records=100, keep=4000, folder=str(tmp_path / "refits")))
    records = serve(llm, refitter)
    assert records[0]["version"] == 1
    assert "cannot be written" in records[0]["not_kept"]


def test_calibration_of_the_policy_in_force_is_refitted():
    llm = engine("confidence")
    refitter = refitting(llm, RefitOptions(every=0.0, min_records=100, keep=4000))
    worst = ConfidenceModel.day_one(8).weight
    worst[:-2] = -6.0
    (scorer,) = llm.engine.worker.policy.scorers()
    assert isinstance(scorer, ConfidenceScorer)
    scorer.take(worst)
    scorer.REFIT_EVERY = 10**9  # its own learning, in steps, is not what is tested
    first = serve(llm, refitter)[0]["confidence"]
    assert first["outcome"] == "accepted"
    assert first["new"]["log_loss"] < first["old"]["log_loss"]
    assert not torch.equal(scorer.model.weight, worst)


def test_a_policy_switched_while_a_refit_runs_has_the_new_predictor():
    llm = engine("full")
    refitter = refitting(llm)
    llm.engine.add("a", [1, 2, 3], PARAMS, 0)
    records = serve(llm, refitter)
    assert llm.switch("dvl", 4.0) == "dvl"
    served = llm.load_predictor()
    (scorer,) = llm.engine.worker.policy.scorers()
    assert scorer.predictor is served  # type: ignore[attr-defined]
    assert records[0]["version"] == 1
    version = refitter.now().version
    records = serve(llm, refitter, PROMPTS[::-1])
    assert {one["version"] for one in records} <= set(range(version, version + len(records) + 1))


def test_fewer_prompts_or_records_than_asked_for_begin_nothing():
    llm, process = engine(), Here()
    assert serve(llm, refitting(llm, process=process), PROMPTS[:15] * 3) == []
    llm = engine()
    assert serve(llm, refitting(llm, RefitOptions(0.0, 10_000, 20_000), process)) == []
    llm = engine()
    assert serve(llm, refitting(llm, RefitOptions(3600.0, 100, 4000), process)) == []
    assert process.jobs == []


def test_without_drafts_there_is_nothing_to_refit():
    target = tiny_target("llama")
    with pytest.raises(InputError, match="drafts nothing"):
        LLM(target, None, None, "auto", recorder=refitting_recorder(), dtype="float32", device="cpu", num_pages=32)


class Idle:
    """A link that hands out `first`, then nothing until a Refitted was sent; then a Stop."""

    def __init__(self, first: list[object]) -> None:
        self.first, self.sent = first, []
        self.waits: list[float | None] = []

    def receive(self, timeout: float | None) -> list[Any]:
        self.waits.append(timeout)
        if self.first:
            first, self.first = self.first, []
            return first
        if any(isinstance(one, Refitted) for one in self.sent):
            return [Stop(0.0)]
        assert timeout is not None, "the loop would never hear of the refit"
        time.sleep(timeout)
        return []

    def send(self, messages: list[Any]) -> None:
        self.sent += messages


def test_an_idle_loop_takes_in_a_refit_and_shows_it():
    class Slow(Here):
        def run(self, job: RefitJob) -> Refit:
            time.sleep(0.5)
            return super().run(job)

    llm = engine()
    refitter = refitting(llm, process=Slow())
    submits: list[object] = [Submit(str(n), prompt, PARAMS, n) for n, prompt in enumerate(PROMPTS)]
    link = Idle(submits)
    EngineLoop(llm, link, 64, refitter).run()
    assert 0.2 in link.waits
    (refitted,) = [one for one in link.sent if isinstance(one, Refitted)]
    assert refitted.record["version"] == 1
    shown = [one.refit for one in link.sent if isinstance(one, Snapshot)]
    assert shown[0].version == 0
    assert shown[-1].version == 1
    assert shown[-1].outcomes["predictor"] == {"accepted": 1, "rejected": 0}
    assert sum(bool(one.finish_reason) for one in link.sent if isinstance(one, Delta)) == len(PROMPTS)


def test_a_real_server_process_refits_and_outlives_a_killed_fit(folders, caplog: pytest.LogCaptureFixture):
    """The whole way: a process that serves, one that fits and is killed, one that fits, a line in the log."""
    pair = {"drafter": str(folders["drafter"]), "predictor": str(folders["predictor"]), "dtype": "float32"}
    options = {**pair, "policy": "dvl", "slots": 3.0, "device": "cpu", "max_requests": 8, "num_pages": 120}
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    prompts = [(5 + n, 6 + n % 7, 7) for n in range(24)]
    offline = LLM(str(folders["target"]), **options)
    want = [one.outputs[0].token_ids for one in offline.generate(prompt_token_ids=prompts, sampling_params=params)]

    async def answer(client: Client, id: str, prompt: tuple[int, ...]) -> list[int]:
        tokens: list[int] = []
        async with aclosing(client.generate(Submit(id, prompt, params, 0))) as deltas:
            async for delta in deltas:
                tokens += delta.token_ids
        return tokens

    async def refitted(client: Client, count: int) -> None:
        async with asyncio.timeout(120):
            while sum(record.getMessage() == "refit" for record in caplog.records) < count:
                await asyncio.sleep(0.05)

    async def scenario() -> list[list[int]]:
        client = await Client.start(str(folders["target"]), refit=SOON, **options)
        try:
            answers = list(await asyncio.gather(*(answer(client, f"a{n}", one) for n, one in enumerate(prompts))))
            async with asyncio.timeout(30):
                while not (child := child_of(client.pid)):
                    await asyncio.sleep(0.02)
            os.kill(child, signal.SIGKILL)
            await refitted(client, 1)
            answers += await asyncio.gather(*(answer(client, f"b{n}", one) for n, one in enumerate(prompts)))
            await refitted(client, 2)
            answers += await asyncio.gather(*(answer(client, f"c{n}", one) for n, one in enumerate(prompts)))
            assert await client.switch(Switch("full")) == "full"
            assert client.snapshot.refit is not None
            assert client.snapshot.refit.version == 1
        finally:
            assert await client.stop(5.0) == 0
        return answers

    with caplog.at_level(logging.INFO, "dscale.serve"):
        assert asyncio.run(scenario()) == want * 3
    lines: list[dict[str, Any]] = [vars(one)["fields"] for one in caplog.records if one.getMessage() == "refit"]
    assert lines[0] == {"outcome": "failed", "reason": "its process ended with code -9", "version": 0}
    assert lines[1]["predictor"]["outcome"] == "accepted"
    assert lines[1]["predictor"]["new"]["log_loss"] < lines[1]["predictor"]["old"]["log_loss"]


def child_of(pid: int) -> int | None:
    """A child process of this one, from /proc."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            return int(path.parent.name)
    return None
