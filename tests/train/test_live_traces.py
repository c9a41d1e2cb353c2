"""A folder of live traffic: what it holds, that it grows, and that a full disk ends the recording only."""

from __future__ import annotations

import numpy as np
import pytest

from dscale.config import InputError, SamplingParams
from dscale.engine.recorder import Recorder
from dscale.train import artifacts
from dscale.train.live_traces import LiveTraces
from dscale.train.traces import Traces, prompt_id
from tests.engine.pairs import make_llm, tiny_drafter, tiny_target

PARAMS = SamplingParams(temperature=1.0, seed=5, max_tokens=24)
PROMPTS = [[1, 2, 3], [4, 4, 1], [2, 2], [1, 2, 3], [0, 3]]


def serve(folder, prompts=PROMPTS, policy="confidence", seed=0, requests=2):
    target = tiny_target("llama", seed=seed)
    recorder = Recorder()
    llm = make_llm(target, policy, tiny_drafter(target), recorder=recorder, slots=3.0)
    live = LiveTraces.attach(recorder, llm, folder, requests)
    outputs = llm.generate(prompt_token_ids=prompts, sampling_params=PARAMS)
    live.close()
    return live, recorder, [one.outputs[0] for one in outputs]


def test_live_traffic_is_kept_and_a_later_run_adds_to_it(tmp_path):
    _, recorder, outputs = serve(tmp_path)
    first = Traces.open(tmp_path)
    assert len(first) == recorder.recorded
    assert sorted(set(first.request.tolist())) == [0, 1, 2, 3, 4]
    assert set(first.prompt.tolist()) == {prompt_id(prompt) for prompt in PROMPTS}
    assert len(set(first.slots.tolist())) > 2
    assert not first.exact.all()
    steps = sum(one.metrics.steps for one in outputs)
    assert len(first) + sum(recorder.skipped.values()) == steps
    serve(tmp_path, PROMPTS[:3])
    both = Traces.open(tmp_path)
    assert sorted(set(both.request.tolist())) == list(range(8))
    kept = both.select(both.request < 5)
    assert np.array_equal(kept.features, first.features)


def test_traffic_of_another_pair_is_refused(tmp_path):
    serve(tmp_path, PROMPTS[:1])
    with pytest.raises(InputError, match="give another folder"):
        serve(tmp_path, PROMPTS[:1], seed=1)


def test_a_full_disk_ends_the_recording_and_not_the_answers(tmp_path, monkeypatch):
    _, _, want = serve(tmp_path / "good")

    def refuse(path, data):
        raise InputError(f"{path}: cannot be written")

    target = tiny_target("llama")
    recorder = Recorder()
    llm = make_llm(target, "confidence", tiny_drafter(target), recorder=recorder, slots=3.0)
    live = LiveTraces.attach(recorder, llm, tmp_path / "full", 2)
    monkeypatch.setattr(artifacts, "write_bytes", refuse)
    with pytest.warns(UserWarning, match="recording ends, the engine goes on"):
        outputs = llm.generate(prompt_token_ids=PROMPTS, sampling_params=PARAMS)
    live.close()
    assert live.refused is not None
    assert [one.outputs[0].token_ids for one in outputs] == [one.token_ids for one in want]
