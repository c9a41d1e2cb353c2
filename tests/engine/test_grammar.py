"""Structured output under speculation: every policy gives the text that the target gives alone, and it is valid."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import jsonschema
import pytest
import torch

from dscale.config import Grammar, InputError, SamplingParams
from dscale.engine.llm import LLM
from dscale.models.loader import LoadedTarget, random_target
from dscale.speculation import decode_step as step
from tests.engine.pairs import tiny_drafter, tiny_target
from tests.engine.test_lossless import random_predictor
from tests.models.test_tokenizer import byte_tokenizer

pytest.importorskip("xgrammar")
POLICIES = ("full", "fixed:3", "dvl", "confidence", "auto")
TOKENIZER = byte_tokenizer()
END = len(TOKENIZER) - 1
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
}
LIST = 'root ::= "[" item ("," item){0,3} "]"\nitem ::= "yes" | "no" | "(" root ")"'
GRAMMARS = (
    Grammar.json_schema(PERSON),
    Grammar("regex", r"[0-9]{3}-[a-f]{2,4}(\.[0-9]{2})?"),
    Grammar.choice(["left", "leftmost", "right", "é"]),
    Grammar("ebnf", LIST),
    Grammar.json_schema({"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}),
    None,
)


@cache
def target() -> LoadedTarget:
    """A random target over bytes, with a head wider than its tokenizer and an end token."""
    bare = tiny_target("llama", vocab=len(TOKENIZER) + 3)
    config = replace(bare.config, eos_token_ids=(END,))
    return replace(bare, model=random_target(config, 1), config=config, own_tokenizer=TOKENIZER)


def engine(policy: str, **options: Any) -> LLM:
    drafter = tiny_drafter(target()) if policy != "off" else None
    predictor = random_predictor(drafter, drafter.config.width) if policy.startswith("dvl") else None
    settings = {"num_pages": 80, "max_requests": 4, "slots": 4.0, "dtype": "float32", "device": "cpu", **options}
    return LLM(target(), drafter=drafter, predictor=predictor, policy=policy, **settings)


def params(grammar: Grammar | None, sampled: bool, **changes: Any) -> SamplingParams:
    style = {"temperature": 1.5, "top_p": 0.98, "seed": 3} if sampled else {"temperature": 0.0}
    return SamplingParams(grammar=grammar, **{"max_tokens": 90, **style, **changes})


PROMPTS = [TOKENIZER.encode(f"prompt {index}: give an answer") for index in range(len(GRAMMARS) * 2)]


def asked(sampled: bool, **changes: Any) -> list[SamplingParams]:
    return [params(GRAMMARS[index % len(GRAMMARS)], sampled, **changes) for index in range(len(PROMPTS))]


@cache
def alone(sampled: bool) -> list[tuple[list[int], str, str]]:
    llm = engine("off", max_requests=1)
    return [answer(llm.generate(prompt_token_ids=[p], sampling_params=[s])[0])
            for p, s in zip(PROMPTS, asked(sampled), strict=True)]  # fmt: skip


def answer(output: Any) -> tuple[list[int], str, str]:
    one = output.outputs[0]
    return one.token_ids, one.text, one.finish_reason


@pytest.fixture
def good_drafts(monkeypatch: pytest.MonkeyPatch) -> Callable[[LLM, bool], None]:
    """Drafts that know the answer but for a few tokens, legal and illegal; a random drafter is hardly ever right."""

    def install(llm: LLM, sampled: bool) -> None:
        plain, rng = step.draft_block, random.Random(1)
        known = {tuple(prompt): tokens for prompt, (tokens, _, _) in zip(PROMPTS, alone(sampled), strict=True)}

        def draft_block(state, work, *rest):
            draft = plain(state, work, *rest)
            by_row = {request.row: request for request in llm.engine.scheduler.running}
            for lane, row in enumerate(work.lanes.tolist()):
                if row not in by_row:
                    continue
                request = by_row[row]
                coming = known[tuple(request.prompt)][len(request.output) :][: draft.tokens.shape[1]]
                coming = [token if rng.random() < 0.85 else rng.choice([65, END, token]) for token in coming]
                draft.tokens[lane, : len(coming)] = torch.tensor(coming, dtype=torch.int64)
            return draft

        monkeypatch.setattr(step, "draft_block", draft_block)

    return install


def valid(grammar: Grammar | None, text: str) -> bool:
    if grammar is None:
        return True
    if grammar.kind == "json_schema":
        jsonschema.validate(json.loads(text), json.loads(grammar.text))
        return True
    if grammar.kind == "choice":
        return text in json.loads(grammar.text)
    if grammar.kind == "regex":
        return re.fullmatch(grammar.text, text) is not None
    while (shorter := re.sub(r"\(\[(yes|no)(,(yes|no)){0,3}\]\)", "yes", text)) != text:
        text = shorter
    return re.fullmatch(r"\[(yes|no)(,(yes|no)){0,3}\]", text) is not None


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "seeded"])
@pytest.mark.parametrize("policy", ["off", *POLICIES])
def test_policy_changes_no_text_and_all_of_it_is_valid(policy: str, sampled: bool, good_drafts) -> None:
    """Requests of five grammars and of none in one batch; few pages, so that some are preempted and rebuilt."""
    llm = engine(policy, num_pages=12)
    if policy != "off":
        good_drafts(llm, sampled)
    outputs = llm.generate(prompt_token_ids=PROMPTS, sampling_params=asked(sampled))
    assert [answer(output) for output in outputs] == alone(sampled)
    ended = [(one, out) for one, out in zip(asked(sampled), outputs, strict=True) if answer(out)[2] == "stop"]
    assert len({one.grammar for one, _ in ended if one.grammar}) >= 4
    for one, output in ended:
        assert valid(one.grammar, answer(output)[1])
    assert llm.engine.scheduler.preemptions > 0
    assert llm.engine.scheduler.pool.held == 0
    if policy != "off":
        assert max(record.accepted for out in outputs for record in out.metrics.records) >= 2


@pytest.mark.parametrize("policy", ["off", "full"])
def test_sequences_of_one_prompt_keep_their_own_states(policy: str) -> None:
    one = params(GRAMMARS[0], True, n=3, logprobs=1)
    (output,) = engine(policy).generate(prompt_token_ids=[PROMPTS[0]], sampling_params=one)
    texts = [each.text for each in output.outputs if each.finish_reason == "stop"]
    assert len(set(texts)) >= 2
    assert all(valid(GRAMMARS[0], text) for text in texts)
    assert all(len(each.logprobs) == len(each.token_ids) for each in output.outputs)


@pytest.mark.parametrize("policy", ["off", "full", "fixed:3"])
def test_stop_strings_penalties_and_min_tokens_go_with_a_grammar(policy: str, good_drafts) -> None:
    llm = engine(policy)
    if policy != "off":
        good_drafts(llm, False)
    changes = {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "min_tokens": 30, "logit_bias": {34: -2.0}}
    rows = asked(False, **changes)
    reference = engine("off", max_requests=1)
    expected = [answer(reference.generate(prompt_token_ids=[p], sampling_params=[s])[0])
                for p, s in zip(PROMPTS, rows, strict=True)]  # fmt: skip
    assert [answer(one) for one in llm.generate(prompt_token_ids=PROMPTS, sampling_params=rows)] == expected
    short = [text for (_, text, reason), row in zip(expected, rows, strict=True)
             if row.grammar == GRAMMARS[2] and reason == "stop"]  # fmt: skip
    assert short
    assert all(valid(GRAMMARS[2], text) for text in short)  # complete before min_tokens, and ended there
    cut = params(GRAMMARS[0], False, stop=['"age"'])
    (output,) = llm.generate(prompt_token_ids=[PROMPTS[0]], sampling_params=cut)
    assert output.outputs[0].stop_reason == '"age"'
    assert output.outputs[0].text.endswith(",") or output.outputs[0].text.rstrip().endswith(",")


def test_wrong_grammars_are_refused_before_anything_is_queued() -> None:
    llm = engine("off")
    for grammar, message in [
        (Grammar("regex", "a("), "regex: Regex parsing error"),
        (Grammar("json_schema", '{"type": "integer", "multipleOf": 2}'), "'multipleOf' at # cannot be enforced"),
    ]:
        with pytest.raises(InputError, match=message):
            llm.generate(prompt_token_ids=PROMPTS[:2], sampling_params=[params(None, False), params(grammar, False)])
        assert not llm.engine.busy
    no_end = replace(target(), config=replace(target().config, eos_token_ids=()))
    no_end.model.config = no_end.config
    llm = LLM(no_end, policy="off", dtype="float32", device="cpu", num_pages=24)
    with pytest.raises(InputError, match="needs an end token"):
        llm.generate(prompt_token_ids=PROMPTS[:1], sampling_params=params(GRAMMARS[0], False))
    target().model.config = target().config
    bare = LLM(tiny_target("llama"), policy="off", dtype="float32", device="cpu", num_pages=24)
    with pytest.raises(InputError, match="needs an end token"):
        bare.generate(prompt_token_ids=[[1]], sampling_params=params(Grammar("json_object"), False))


def test_missing_package_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with pytest.raises(InputError, match=r"json_object: structured output needs the package xgrammar"):
        engine("off").engine.compile(Grammar("json_object"))


QUESTIONS = ("Describe a person.", "Is the sky blue?", "Name a colour and a number.")
SMOLLM2_GRAMMARS = (
    Grammar.json_schema(PERSON),
    Grammar.choice(["Yes, it is.", "No, it is not.", "Yes"]),
    Grammar("regex", r"(red|green|dark blue), [0-9]{1,4}"),
)


@pytest.fixture(scope="module")
def smollm2_alone(smollm2: LoadedTarget) -> list[list[tuple[list[int], str, str]]]:
    llm = LLM(smollm2, policy="off", dtype="float32", device="cpu", max_requests=1, max_model_len=512)
    return [ask(llm, sampled) for sampled in (False, True)]


def ask(llm: LLM, sampled: bool) -> list[tuple[list[int], str, str]]:
    rows = [params(grammar, sampled, temperature=0.8 * sampled) for grammar in SMOLLM2_GRAMMARS]
    return [answer(one) for one in llm.chat([[{"role": "user", "content": text}] for text in QUESTIONS], rows)]


@pytest.mark.parametrize("policy", POLICIES)
def test_smollm2_answers_in_form_whatever_the_policy(smollm2: LoadedTarget, smollm2_alone, policy: str) -> None:
    llm = LLM(smollm2, policy=policy, dtype="float32", device="cpu", max_requests=4, max_model_len=512, slots=6.0)
    for sampled in (False, True):
        got = ask(llm, sampled)
        assert got == smollm2_alone[sampled]
        for grammar, (_, text, reason) in zip(SMOLLM2_GRAMMARS, got, strict=True):
            assert reason == "stop"
            assert valid(grammar, text)
