"""What the engine records, against the walk over the same answers, and what it must not record."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dscale.config import AnchorLayout, InputError, SamplingParams
from dscale.engine.recorder import Recorder, RequestTrace
from dscale.models.drafter import Drafter
from dscale.models.loader import LoadedTarget
from dscale.speculation.features import GROUPS, FeatureReader
from dscale.train.forward import BlockForward, ForwardConfig
from dscale.train.rows import PackedRows
from dscale.train.trace_walk import collect
from tests.engine.pairs import make_llm, tiny_drafter, tiny_target

GREEDY = SamplingParams(temperature=0.0, max_tokens=40)
PROMPTS = [[1, 2, 0], [0, 0, 1, 0, 2], [2] * 9, [2, 1], [0, 1, 2, 1, 1, 2], [1] * 4]


PAIRS = {"llama": 1, "qwen2": 5}  # seeds of targets that agree with the drafter now and then


def pair(family: str, layout: AnchorLayout) -> tuple[LoadedTarget, Drafter]:
    """Three tokens and full attention: drafts come to agree by chance, and packed rows have no windows."""
    target = tiny_target(family, vocab=3, seed=PAIRS[family])
    windowed = tiny_drafter(target, layout)
    drafter = Drafter(replace(windowed.config, decoder=replace(windowed.config.decoder, windows=())))
    drafter.load_state_dict(windowed.state_dict())
    return target, drafter.eval().requires_grad_(False)


def record(prompts, params=GREEDY, policy="full", layout=AnchorLayout.MASKED, family="qwen2", **options):
    """(recorder, traces in the order of the prompts, outputs, target, drafter)."""
    target, drafter = pair(family, layout)
    made: dict[str, RequestTrace] = {}
    recorder = Recorder(GROUPS, seed=4, done=lambda trace: made.__setitem__(trace.id, trace))
    llm = make_llm(target, policy, drafter, recorder=recorder, **options)
    outputs = llm.generate(prompt_token_ids=prompts, sampling_params=params)
    ordered = [made[f"{index}-0"] for index in range(len(prompts)) if f"{index}-0" in made]
    return recorder, ordered, [one.outputs[0] for one in outputs], target, drafter


def packed(prompts: list[list[int]], answers: list[list[int]], length: int = 128) -> PackedRows:
    """Two conversations a row."""
    rows = (len(prompts) + 1) // 2
    ids, answer = np.zeros((rows, length), np.int32), np.zeros((rows, length), bool)
    first = np.tile(np.arange(length, dtype=np.int32), (rows, 1))
    for number, (prompt, said) in enumerate(zip(prompts, answers, strict=True)):
        at, size = (number % 2) * 64, len(prompt) + len(said)
        ids[number // 2, at : at + size] = prompt + said
        first[number // 2, at : at + size] = at
        answer[number // 2, at + len(prompt) : at + size] = True
    return PackedRows.plain(ids, first, answer)


@pytest.mark.parametrize("layout", list(AnchorLayout))
@pytest.mark.parametrize("family", list(PAIRS))
def test_engine_and_walk_record_the_same(layout, family):
    _, traces, outputs, target, drafter = record(PROMPTS, layout=layout, family=family)
    rows = packed(PROMPTS, [one.token_ids for one in outputs])
    forward = BlockForward(target.model, drafter, ForwardConfig(length=128, rows=2, anchors=3))
    walked = collect(forward, rows, FeatureReader.build(GROUPS, target.model.head.weight, 4), lanes=4)
    assert len(walked) == sum(len(trace.accepted) for trace in traces)
    assert len(set(walked.accepted.tolist())) >= 4  # acceptance varies
    assert 0 < (~walked.exact).sum() < len(walked) / 4
    for number, trace in enumerate(traces):
        ours = walked.select(walked.request == number)
        for name in ("drafts", "accepted", "slots", "position"):
            assert np.array_equal(getattr(ours, name), getattr(trace, name)), name
        mine, theirs = ours.features.astype(np.float32), trace.features.astype(np.float32)
        lanes = walked.features.shape[1] - 25  # live requests, fewer at the end
        assert set(theirs[:, lanes]) <= {1, 2, 3, 4}
        mine[:, lanes] = theirs[:, lanes]
        assert np.allclose(mine, theirs, atol=2e-3, rtol=2e-3)


def test_cut_inside_a_block_is_censored_and_at_its_bonus_token_is_not():
    _, (whole,), (output,), _, _ = record(PROMPTS[:1])
    step = int(np.flatnonzero((whole.accepted >= 2) & (whole.position > 0))[0])
    before, accepted = int(whole.position[step]), int(whole.accepted[step])
    for kept, slots in ((1, 2), (accepted, accepted + 1), (accepted + 1, 8)):
        params = SamplingParams(temperature=0.0, max_tokens=before + kept)
        _, (cut,), _, _, _ = record(PROMPTS[:1], params)
        assert cut.accepted[:-1].tolist() == whole.accepted[:step].tolist()
        assert (cut.accepted[-1], cut.slots[-1]) == (min(kept, accepted), slots)
        assert cut.output == tuple(output.token_ids[: before + kept])


def test_an_end_token_among_the_drafts_censors_too():
    _, (whole,), (output,), _, _ = record(PROMPTS[:1])
    for token in range(3):
        if token not in output.token_ids:
            continue
        at = output.token_ids.index(token)
        params = SamplingParams(temperature=0.0, max_tokens=40, stop_token_ids=[token])
        _, (cut,), _, _, _ = record(PROMPTS[:1], params)
        step = int(np.flatnonzero(whole.position <= at)[-1])
        kept = at + 1 - int(whole.position[step])
        within = kept <= whole.accepted[step]
        assert len(cut.accepted) == step + 1
        assert cut.slots[-1] == (kept + 1 if within else 8)
        assert cut.accepted[-1] == (kept if within else whole.accepted[step])


def test_edited_requests_narrow_blocks_and_single_rows_are_counted_not_kept():
    edited = SamplingParams(temperature=0.0, max_tokens=20, presence_penalty=1.0)
    recorder, traces, outputs, _, _ = record(PROMPTS[:2], [GREEDY, edited])
    assert len(traces) == 1
    assert traces[0].prompt == tuple(PROMPTS[0])
    assert recorder.skipped == {"edited logits": outputs[1].metrics.steps}
    recorder, traces, outputs, _, _ = record(PROMPTS[:2], policy="fixed:3")
    assert not traces
    assert recorder.skipped == {"other width": sum(one.metrics.steps for one in outputs)}


@pytest.mark.parametrize("policy", ["confidence", "auto"])
def test_adaptive_policies_record_what_they_verified_and_keep_their_text(policy):
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=60)
    _, _, want, _, _ = record(PROMPTS, params)
    recorder, traces, outputs, _, _ = record(PROMPTS, params, policy, slots=3.0)
    assert [one.token_ids for one in outputs] == [one.token_ids for one in want]
    assert recorder.recorded == sum(len(trace.accepted) for trace in traces)
    assert recorder.recorded + sum(recorder.skipped.values()) == sum(one.metrics.steps for one in outputs)
    for trace in traces:
        assert ((trace.slots >= 2) & (trace.slots <= 8) & (trace.accepted < trace.slots)).all()
    if policy == "confidence":
        slots = np.concatenate([trace.slots for trace in traces])
        assert len(set(slots.tolist())) > 2


def test_an_aborted_request_hands_on_what_it_has():
    target = tiny_target("llama")
    made = []
    llm = make_llm(target, "full", tiny_drafter(target), recorder=Recorder(done=made.append))
    request = llm.engine.add("gone", [1, 2, 3], GREEDY, 0)
    llm.engine.step()
    llm.engine.step()
    llm.engine.abort("gone")
    assert len(made[0].accepted) == 2
    assert made[0].output == tuple(request.output)


def test_a_policy_without_drafts_has_nothing_to_record():
    with pytest.raises(InputError, match="policy 'off' drafts nothing"):
        make_llm(tiny_target("llama"), "off", recorder=Recorder())
