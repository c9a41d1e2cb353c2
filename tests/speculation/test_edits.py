import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dscale.config import InputError, SamplingParams
from dscale.speculation.edits import LogitEdits, apply_edits

VOCAB = 9


def edited_one_by_one(
    logits: list[float], params: SamplingParams, prompt: list[int], output: list[int], end_ids: list[int]
) -> list[float]:
    """One row's edits by vLLM's definitions, token by token in Python floats, after `output` was emitted."""
    x = list(logits)
    for token in range(VOCAB):
        if len(output) < params.min_tokens and token in end_ids:
            x[token] = float("-inf")
        x[token] += (params.logit_bias or {}).get(token, 0.0)
        if token in prompt or token in output:
            x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
        x[token] -= params.frequency_penalty * output.count(token)
        x[token] -= params.presence_penalty * (token in output)
    return x


tokens = st.lists(st.integers(0, VOCAB - 1), max_size=8)
parameters = st.builds(
    SamplingParams,
    presence_penalty=st.sampled_from([0.0, 0.7, -1.5]),
    frequency_penalty=st.sampled_from([0.0, 0.3, -0.25]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.5]),
    logit_bias=st.sampled_from([None, {0: 2.5, 8: -100.0}]),
    min_tokens=st.sampled_from([0, 3, 12]),
    max_tokens=st.just(64),
)


@settings(max_examples=300, deadline=None)
@given(parameters, tokens, st.lists(tokens, max_size=3), tokens, st.integers(0, 2**31))
def test_rows_are_edited_as_if_drafts_were_emitted(
    params: SamplingParams, prompt: list[int], steps: list[list[int]], drafts: list[int], seed: int
) -> None:
    end_ids = [2, 5]
    state = LogitEdits.begin(params, prompt, VOCAB, end_ids)
    for step in steps:
        state.commit(step)
    output = [token for step in steps for token in step]
    logits = torch.randn(len(drafts) + 1, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    before = logits.clone()
    edited = apply_edits(logits, state, torch.tensor(drafts, dtype=torch.int64))
    assert torch.equal(logits, before)
    for row in range(len(drafts) + 1):
        expected = edited_one_by_one(logits[row].tolist(), params, prompt, output + drafts[:row], end_ids)
        torch.testing.assert_close(edited[row], torch.tensor(expected), rtol=1e-5, atol=1e-5)


def test_speculated_and_plain_decoding_see_the_same_rows() -> None:
    params = SamplingParams(presence_penalty=0.5, repetition_penalty=1.2, frequency_penalty=0.1, min_tokens=4)
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(0)).bfloat16()
    drafts = [3, 3, 1]
    block = apply_edits(logits, LogitEdits.begin(params, [1, 7], VOCAB, [0]), torch.tensor(drafts))
    state, none = LogitEdits.begin(params, [1, 7], VOCAB, [0]), torch.empty(0, dtype=torch.int64)
    for row in range(4):
        assert torch.equal(apply_edits(logits[row : row + 1], state, none)[0], block[row])
        state.commit(drafts[row : row + 1])
    assert block.dtype == torch.float32


def test_min_tokens_counts_the_row() -> None:
    state = LogitEdits.begin(SamplingParams(min_tokens=5, max_tokens=9), [1], VOCAB, [4, 6])
    state.commit([1, 1, 1])
    edited = apply_edits(torch.zeros(4, VOCAB), state, torch.tensor([0, 0, 0]))
    banned = [[token for token in range(VOCAB) if row[token] == -torch.inf] for row in edited]
    assert banned == [[4, 6], [4, 6], [], []]


def test_allowed_mask_follows_the_drafts() -> None:
    """A grammar's hook: here a token must be greater than the one before."""

    def rising(drafts: Tensor) -> Tensor:
        before = torch.cat([torch.tensor([2]), drafts])
        return torch.arange(VOCAB) > before[:, None]

    state = dataclasses.replace(LogitEdits.begin(SamplingParams(), [2], VOCAB), allowed=rising)
    edited = apply_edits(torch.zeros(3, VOCAB), state, torch.tensor([5, 7]))
    assert [(row > -torch.inf).nonzero().flatten().tolist() for row in edited] == [[3, 4, 5, 6, 7, 8], [6, 7, 8], [8]]


def test_plain_requests_keep_no_history() -> None:
    state = LogitEdits.begin(SamplingParams(logit_bias={1: 1.0}), [0, 1], VOCAB)
    state.commit([3, 4])
    assert not state.penalises
    assert state.emitted == 2
    assert int(state.counts.sum()) == 0


@pytest.mark.parametrize("token", [-1, VOCAB])
def test_bias_outside_the_vocabulary_is_refused(token: int) -> None:
    with pytest.raises(InputError, match=rf"logit_bias: token {token} is outside the vocabulary 0…8"):
        LogitEdits.begin(SamplingParams(logit_bias={token: 1.0}), [0], VOCAB)
