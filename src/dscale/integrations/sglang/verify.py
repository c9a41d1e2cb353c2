"""Ragged verification and acceptance on SGLang's objects: the spec info of a pass, and how its rows are sampled.

SGLang's own path verifies [N, W] rows and accepts them by kernels of that layout. Here request i owns the rows
starts[i] … starts[i+1]-1, as everywhere in this project, and acceptance is that of speculation/acceptance.py.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from torch import Tensor

from dscale.kernels.top_logits import argmax
from dscale.speculation.packing import Packed, PackedRows
from dscale.speculation.sampling import RowParams, draw
from dscale.speculation.transfer import place


@dataclass
class RaggedVerifyInput(DFlashVerifyInput):
    """draft_token_num is the mean number of rows a request (SGLang sizes its graphs by it); starts [N+1] int64."""

    starts: Tensor | None = None


class Requests:
    """What the host knows of the requests of a batch, on the device; made anew when the batch changes."""

    def __init__(self, vocab: int, device: torch.device | str) -> None:
        self.vocab, self.device = vocab, device
        self._key: tuple[str, ...] = ()
        self.seeds = torch.zeros(0, dtype=torch.int64)
        self._first: list[bool] = []
        self._initial = torch.zeros(0, dtype=torch.bool)

    def update(self, batch: Any) -> None:
        """For the requests of a ScheduleBatch."""
        key = tuple(request.rid for request in batch.reqs)
        if key == self._key:
            return
        self._key = key
        seeds = [seed_of(request) for request in batch.reqs]
        self.seeds = place(seeds, torch.int64, self.device)

    def initial(self, batch: Any) -> Tensor:
        """Requests in their first step after the prompt, bool [N] (the host's view, which may lag a step behind)."""
        first = [len(request.output_ids) <= 1 for request in batch.reqs]
        if first != self._first:  # seldom: a copy to the device is not free
            self._first, self._initial = first, place(first, torch.bool, self.device)
        return self._initial

    def params(self, sampling: Any, packed: Packed, rows: PackedRows) -> RowParams:
        """How the rows are sampled. SGLang says greedy by top_k = 1 and no top_k by a number beyond any vocabulary."""
        lane = packed.lane_of_row
        top_k = sampling.top_ks[lane].long()
        temperature = sampling.temperatures.view(-1)[lane].masked_fill(top_k == 1, 0.0)
        top_k = top_k.masked_fill(top_k >= self.vocab, 0)
        seeds, positions = self.seeds[lane], rows.positions + 1
        return RowParams(temperature, top_k, sampling.top_ps[lane], sampling.min_ps[lane], seeds, positions)


def seed_of(request: Any) -> int:
    """The request's sampling_seed, or a number of its id: the same on every rank."""
    given = request.sampling_params.sampling_seed
    return int(given) if given is not None else zlib.crc32(str(request.rid).encode())


def refusal(request: Any) -> str | None:
    """Why a request cannot be served: what may be drawn must not depend on drafts that are not accepted yet."""
    params = request.sampling_params
    named = {
        "custom_logit_processor": bool(getattr(request, "custom_logit_processor", None)),
        "frequency_penalty": params.frequency_penalty != 0.0,
        "presence_penalty": params.presence_penalty != 0.0,
        "repetition_penalty": params.repetition_penalty != 1.0,
        "min_new_tokens": params.min_new_tokens > 0,
    }
    found = [name for name, wanted in named.items() if wanted]
    return f"DSCALE does not support {', '.join(found)} on SGLang" if found else None


def greedy(sampling: Any) -> bool:
    """Whether the highest logit is every row's token."""
    return sampling is None or (sampling.is_all_greedy and sampling.logit_bias is None)


def choose(logits: Tensor, sampling: Any, requests: Requests, packed: Packed, rows: PackedRows) -> Tensor:
    """y ~ P at every row of logits [M, V], int64 [M]."""
    bias = None if sampling is None else sampling.logit_bias
    if bias is not None:
        logits = logits + bias[packed.lane_of_row].to(logits.dtype)
    if sampling is None or sampling.is_all_greedy:
        return argmax(logits)
    return draw(logits, requests.params(sampling, packed, rows), all_greedy=False)
