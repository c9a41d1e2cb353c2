"""Edits of one request's logits that depend on the text before: penalties, bias, min_tokens, masks (dscale.md §3).

Row j of a request is edited as if drafts 1…j had been emitted, so speculation does not change the distribution. With
c_v the times token v was emitted by then, in vLLM's order:
    masks         x_v = -inf where the mask forbids v
    min_tokens    x_v = -inf for end tokens while fewer than min_tokens were emitted, unless nothing else is allowed
    logit_bias    x_v += bias_v
    repetition    x_v = x_v / r if x_v > 0 else x_v · r          for v in the prompt or emitted
    frequency     x_v -= f · c_v
    presence      x_v -= p · [c_v > 0]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dscale.config import SamplingParams, require
from dscale.speculation.grammar import GrammarState

AllowedMask = Callable[[Tensor], Tensor]  # drafts [k-1] int64 → bool [k, V], row j after drafts 1…j


@dataclass
class LogitEdits:
    """State of one request's edits; `commit` follows what it emits.

    counts [V] int32: times emitted; in_prompt [V] bool; seen [S] int64: the different ids of prompt and output;
    bias_ids, bias [B]; end_ids [E] int64: tokens that may end the text; emitted: tokens so far. The penalties are those
    of `params`. allowed: an extra mask, None for no limit; with a grammar it is the grammar's.
    """

    params: SamplingParams
    counts: Tensor
    in_prompt: Tensor
    seen: Tensor
    bias_ids: Tensor
    bias: Tensor
    end_ids: Tensor
    emitted: int = 0
    allowed: AllowedMask | None = None
    grammar: GrammarState | None = None

    @classmethod
    def begin(
        cls,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        vocab_size: int,
        end_ids: Sequence[int] = (),
        device: torch.device | str = "cpu",
        grammar: GrammarState | None = None,
    ) -> LogitEdits:
        """State before the first token. end_ids: end tokens and stop ids that min_tokens holds back. grammar: the
        state, before the first token too, of the grammar that the text follows.

        Raises InputError when logit_bias names a token outside the vocabulary.
        """
        bias = params.logit_bias or {}
        for token in bias:
            require(0 <= token < vocab_size, f"logit_bias: token {token} is outside the vocabulary 0…{vocab_size - 1}")
        seen = torch.tensor(sorted(set(prompt_ids)), dtype=torch.int64, device=device)
        in_prompt = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        in_prompt[seen] = True
        return cls(
            params=params,
            counts=torch.zeros(vocab_size, dtype=torch.int32, device=device),
            in_prompt=in_prompt,
            seen=seen,
            bias_ids=torch.tensor(list(bias.keys()), dtype=torch.int64, device=device),
            bias=torch.tensor(list(bias.values()), dtype=torch.float32, device=device),
            end_ids=torch.tensor(sorted(set(end_ids)), dtype=torch.int64, device=device),
            allowed=grammar.allowed if grammar is not None else None,
            grammar=grammar,
        )

    @property
    def penalises(self) -> bool:
        """True when emitted tokens change later logits."""
        p = self.params
        return bool(p.presence_penalty or p.frequency_penalty or p.repetition_penalty != 1.0)

    def commit(self, tokens: Sequence[int]) -> None:
        """Note tokens that the request emitted."""
        self.emitted += len(tokens)
        if self.grammar is not None:
            self.grammar.commit(tokens)
        if not self.penalises or not tokens:
            return
        ids = torch.tensor(list(tokens), dtype=torch.int64, device=self.counts.device)
        self.seen = torch.cat([self.seen, ids]).unique()
        self.counts.index_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))


def apply_edits(logits: Tensor, state: LogitEdits, drafts: Tensor) -> Tensor:
    """Logits of one request's rows [k, V], edited: a new float32 tensor. drafts [k-1] int64, as in its rows 1…k-1."""
    edited = logits.to(torch.float32, copy=True)
    if state.allowed is not None:
        edited.masked_fill_(~state.allowed(drafts), -torch.inf)
    held_back = edited[: max(state.params.min_tokens - state.emitted, 0)]
    longer = held_back.index_fill(1, state.end_ids, -torch.inf)
    # A complete text of a grammar can only end, also before min_tokens.
    held_back.copy_(torch.where(longer.isneginf().all(-1, keepdim=True), held_back, longer))
    edited[:, state.bias_ids] += state.bias
    if state.penalises:
        apply_penalties(edited, state, drafts)
    return edited


def apply_penalties(edited: Tensor, state: LogitEdits, drafts: Tensor) -> None:
    """Penalise, in place, the tokens that prompt, output or drafts contain: edited [k, V] float32, drafts [k-1]."""
    params = state.params
    # A token may stand in columns twice; both copies compute the same value, so writing them back is well defined.
    columns = torch.cat([state.seen, drafts])
    earlier = torch.zeros(edited.shape[0], columns.shape[0], dtype=torch.int32, device=edited.device)
    earlier[1:] = (drafts[:, None] == columns).cumsum(0)
    count = state.counts[columns] + earlier
    x = edited[:, columns]
    repeated = torch.where(x > 0, x / params.repetition_penalty, x * params.repetition_penalty)
    x = torch.where(state.in_prompt[columns] | (count > 0), repeated, x)
    edited[:, columns] = x - params.frequency_penalty * count - params.presence_penalty * (count > 0)
