"""The engine's smaller promises: log-probabilities, caps, aborts, the alarm for a drafter that never agrees."""

from __future__ import annotations

import json
import warnings
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dscale.config import InputError, SamplingParams
from dscale.engine.engine import Engine
from dscale.engine.request import FinishReason, Request
from dscale.engine.text import TextStream
from dscale.layers.attention import DenseAttention
from dscale.layers.rotary import rotary_table
from dscale.models.tokenizer import IncrementalDecoder
from tests.engine.pairs import make_llm, tiny_drafter, tiny_target
from tests.models.test_tokenizer import BYTES

GREEDY = SamplingParams(temperature=0.0, max_tokens=20)


def dense_logprobs(target, ids: list[int]) -> torch.Tensor:
    """Log-probabilities of the next token at every position, without a cache."""
    decoder = target.config.decoder
    table = rotary_table(decoder.rope, decoder.head_dim, len(ids), torch.device("cpu"))
    with torch.no_grad():
        hidden, _ = target.model(torch.tensor(ids), DenseAttention(decoder, table, 1, len(ids)))
        return target.model.logits(hidden).log_softmax(-1)


def test_metrics_become_json():
    target = tiny_target("qwen3", vocab=23)
    (output,) = make_llm(target, "full", tiny_drafter(target)).generate(
        prompt_token_ids=[[1, 2, 3]], sampling_params=GREEDY
    )
    records = json.loads(json.dumps(asdict(output.metrics)))["records"]
    assert len(records) == output.metrics.steps
    assert sum(record["emitted"] for record in records) == 20


@pytest.mark.parametrize("chunk", [5, 64])
def test_prompt_and_output_logprobs_are_the_targets(chunk: int):
    target = tiny_target("qwen3", vocab=23)
    llm = make_llm(target, "full", tiny_drafter(target), max_prefill_tokens=chunk)
    prompt = torch.randint(0, 23, (38,), generator=torch.Generator().manual_seed(3)).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=12, logprobs=3, prompt_logprobs=2)
    for _ in range(2):  # the second time its pages are cached, and still every prompt token is scored
        (output,) = llm.generate(prompt_token_ids=[prompt], sampling_params=params)
        tokens = output.outputs[0].token_ids
        table = dense_logprobs(target, prompt + tokens)
        assert output.prompt_logprobs[0] is None
        assert len(output.prompt_logprobs) == len(prompt)
        for position, one in enumerate(output.prompt_logprobs[1:], start=1):
            assert one.token_id == prompt[position]
            assert one.logprob == pytest.approx(float(table[position - 1, prompt[position]]), abs=1e-4)
            assert list(one.top) == table[position - 1].topk(2).indices.tolist()
        for index, one in enumerate(output.outputs[0].logprobs):
            row = table[len(prompt) - 1 + index]
            assert one.token_id == tokens[index]
            assert one.logprob == pytest.approx(float(row[tokens[index]]), abs=1e-4)
            assert list(one.top.values()) == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)


def test_cap_is_cut_to_the_context_length():
    target = tiny_target("llama")
    llm = make_llm(target, "full", tiny_drafter(target), max_model_len=48)
    (output,) = llm.generate(
        prompt_token_ids=[[1, 2, 3] * 10], sampling_params=SamplingParams(temperature=0.0, max_tokens=None)
    )
    assert len(output.outputs[0].token_ids) == 18
    assert output.outputs[0].finish_reason == "length"


def test_prompt_as_long_as_the_context_is_refused_and_leaves_nothing_behind():
    llm = make_llm(tiny_target("llama"), "off", max_model_len=32)
    with pytest.raises(InputError, match="prompt has 32 tokens; the context length is 32"):
        llm.generate(prompt_token_ids=[[1, 2], [1] * 32], sampling_params=GREEDY)
    assert not llm.engine.busy
    assert llm.engine.scheduler.pool.held == 0


@pytest.mark.parametrize(
    ("ids", "params", "message"),
    [
        ([], GREEDY, "prompt is empty"),
        ([99], GREEDY, r"must lie in \[0, 4\]"),
        ([1], SamplingParams(logit_bias={9: 1.0}), "logit_bias"),
        ([1], SamplingParams(stop=["x"]), "need a tokenizer"),
        ([1], SamplingParams(stop_token_ids=list(range(20))), "at most 16"),
    ],
)
def test_bad_requests_are_refused(ids, params, message):
    llm = make_llm(tiny_target("llama"), "off")
    with pytest.raises(InputError, match=message):
        llm.generate(prompt_token_ids=[ids], sampling_params=params)
    assert not llm.engine.busy


def test_abort_frees_pages_and_spares_the_others():
    target = tiny_target("llama")
    llm = make_llm(target, "full", tiny_drafter(target))
    kept = llm.engine.add("kept", [1, 2, 3], GREEDY, 0)
    gone = llm.engine.add("gone", [3, 2, 1], GREEDY, 0)
    waiting = llm.engine.add("waiting", [2], GREEDY, 0)
    llm.engine.step()
    for name in ("gone", "waiting", "never heard of"):
        llm.engine.abort(name)
    while llm.engine.busy:
        llm.engine.step()
    assert [one.finish_reason for one in (kept, gone, waiting)] == [
        FinishReason.LENGTH,
        FinishReason.ABORT,
        FinishReason.ABORT,
    ]
    (alone,) = llm.generate(prompt_token_ids=[[1, 2, 3]], sampling_params=GREEDY)
    assert kept.output == alone.outputs[0].token_ids
    assert llm.engine.scheduler.pool.held == 0


def test_stop_token_ends_the_text_and_is_named():
    llm = make_llm(tiny_target("llama"), "off")
    (free,) = llm.generate(prompt_token_ids=[[1, 2, 3]], sampling_params=SamplingParams(seed=1, max_tokens=30))
    token = free.outputs[0].token_ids[7]
    params = SamplingParams(seed=1, max_tokens=30, stop_token_ids=[token])
    (output,) = llm.generate(prompt_token_ids=[[1, 2, 3]], sampling_params=params)
    expected = free.outputs[0].token_ids[: free.outputs[0].token_ids.index(token) + 1]
    assert output.outputs[0].token_ids == expected
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", token)


def test_alarm_names_the_usual_causes_of_useless_drafts():
    target = tiny_target("llama", vocab=500)
    llm = make_llm(target, "full", tiny_drafter(target))
    rows = [[i, i + 1] for i in range(10)]
    with pytest.warns(UserWarning, match=r"anchor layout \(in force: 1\+N\), taps \(\[0, 1\]\), rotary style \(neox\)"):
        llm.generate(prompt_token_ids=rows, sampling_params=SamplingParams(temperature=1.0, max_tokens=30))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        llm.generate(prompt_token_ids=rows, sampling_params=SamplingParams(temperature=1.0, max_tokens=30))


def appended(request: Request, tokens: list[int], eos: tuple[int, ...]) -> tuple:
    """What `_append` must do, token by token."""
    for count, token in enumerate(tokens, start=1):
        request.output.append(token)
        stopped = request.text.push([token], request.params.min_tokens - len(request.output))
        if token in request.end_ids:
            return tokens[:count], FinishReason.STOP, None if token in eos else token
        if stopped:
            return tokens[:count], FinishReason.STOP, request.text.stopped_by
        if len(request.output) >= request.cap:
            return tokens[:count], FinishReason.LENGTH, None
    return tokens, None, None


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_a_step_ends_a_request_where_its_tokens_one_by_one_would(data: st.DataObject):
    letters = st.text("abé", min_size=1, max_size=2)
    params = SamplingParams(
        stop=data.draw(st.lists(letters, max_size=2, unique=True)), min_tokens=data.draw(st.integers(0, 5)),
        max_tokens=12,
    )  # fmt: skip
    ends = tuple(data.draw(st.lists(st.sampled_from(BYTES.encode("aé")), max_size=2, unique=True)))
    cap, eos = data.draw(st.integers(1, 9)), ends[:1]
    target = SimpleNamespace(config=SimpleNamespace(eos_token_ids=eos))
    engine = Engine(SimpleNamespace(models=SimpleNamespace(target=target)), None, None, 99)  # type: ignore[arg-type]
    ours, theirs = (Request("a", [0], params, 0, ends, cap) for _ in range(2))
    for one in (ours, theirs):
        one.text = TextStream(IncrementalDecoder(BYTES), params.stop)
    for text in data.draw(st.lists(st.text("abcdé", min_size=1, max_size=4), max_size=5)):
        result = engine._append(ours, BYTES.encode(text))
        assert result == appended(theirs, BYTES.encode(text), eos)
        assert (ours.output, ours.text.text, ours.text.stopped_by) == (
            theirs.output, theirs.text.text, theirs.text.stopped_by,
        )  # fmt: skip
        if result[1] is not None:
            return
