"""The output ring: small results of a step, packed on the device, copied to the host while the next step runs.

    counts [N, W' + 4] int64    tokens (W' columns), emitted, accepted, slots, finished
    signals [N, …] float32      survival q, top-1 logit, log-sum-exp of the draft, as far as the policy made them
    features [N, F] float16, drafted [N, D] int64    of blocks that are recorded

Two copies (four while a recorder looks on) and an event a step; the host waits for the event, never for the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dscale.kernels.top_logits import TopLogits
from dscale.speculation.decode_step import StepResult
from dscale.speculation.policies import Draft

COUNTS = 4  # columns after the tokens


@dataclass
class Outputs:
    """A step's results, packed. drafts: D, draft positions; scored, ranked: whether signals hold q and top logits."""

    counts: Tensor
    signals: Tensor | None
    drafts: int
    scored: bool
    ranked: bool
    features: Tensor | None = None
    drafted: Tensor | None = None

    @classmethod
    def pack(cls, result: StepResult) -> Outputs:
        """Pack on the device; reads nothing back."""
        draft = result.draft
        top = draft.top if draft.ranked else None
        sums = torch.stack([result.emitted, result.accepted, result.slots, result.finished.long()], dim=1)
        parts = [] if draft.survival is None else [draft.survival.float()]
        if top is not None:
            parts += [top.values[..., 0].float(), top.log_sum_exp.float()]
        counts = torch.cat([result.tokens, sums], dim=1)
        signals = torch.cat(parts, dim=1) if parts else None
        width, seen = draft.tokens.shape[1], draft.features
        drafted = None if seen is None else draft.tokens
        return cls(counts, signals, width, draft.survival is not None, top is not None, seen, drafted)


@dataclass
class HostOutputs:
    """The same on the host, of the first n lanes: lists, and the draft's signals as CPU tensors (token ids of blocks
    that are recorded only)."""

    tokens: list[list[int]]
    accepted: list[int]
    slots: list[int]
    draft: Draft

    @classmethod
    def read(cls, counts: Tensor, signals: Tensor | None, outputs: Outputs) -> HostOutputs:
        """From host copies [n, …] of the two tensors; what is kept of them is copied, the ring goes round."""
        told = counts.numpy()  # tolist of numpy takes two thirds of the time of torch's
        tokens = [row[:emitted] for row, emitted in zip(told.tolist(), told[:, -COUNTS].tolist(), strict=True)]
        draft = Draft(torch.zeros(len(tokens), outputs.drafts, dtype=torch.int64))
        if signals is not None:
            known, drafts, at = signals.clone(), outputs.drafts, 0
            if outputs.scored:
                at = drafts + 1
                draft.survival = known[:, :at]
            if outputs.ranked:
                best, log_sum = known[:, at : at + drafts], known[:, at + drafts :]
                draft.top = TopLogits(best[..., None], draft.tokens[..., None], log_sum, torch.zeros_like(log_sum))
        return cls(tokens, told[:, 1 - COUNTS].tolist(), told[:, 2 - COUNTS].tolist(), draft)


class RingSlot:
    """Host memory for one step's results, with the events of its start and end."""

    def __init__(self, lanes: int, width: int, device: torch.device) -> None:
        self._pinned = pinned = device.type == "cuda"
        self._lanes = lanes
        self._counts = torch.empty(lanes * (width + COUNTS), dtype=torch.int64, pin_memory=pinned)
        self._signals = torch.empty(lanes * 3 * width, dtype=torch.float32, pin_memory=pinned)
        self._began = torch.cuda.Event(enable_timing=True) if pinned else None
        self._ended = torch.cuda.Event(enable_timing=True) if pinned else None
        self._recorded: dict[str, Tensor] = {}  # features and drafted: made when the first block is recorded
        self._outputs: Outputs | None = None

    def begin(self) -> None:
        """Note when the step begins, in stream order."""
        if self._began is not None:
            self._began.record()

    def end(self, outputs: Outputs) -> None:
        """Start copying a step's results, in stream order."""
        self._outputs = outputs
        _flat(self._counts, outputs.counts).copy_(outputs.counts, non_blocking=True)
        if outputs.signals is not None:
            _flat(self._signals, outputs.signals).copy_(outputs.signals, non_blocking=True)
        if outputs.features is not None and outputs.drafted is not None:
            self._copy("features", outputs.features)
            self._copy("drafted", outputs.drafted)
        if self._ended is not None:
            self._ended.record()

    def _copy(self, name: str, values: Tensor) -> None:
        if name not in self._recorded:
            size = self._lanes * values.shape[1]
            self._recorded[name] = torch.empty(size, dtype=values.dtype, pin_memory=self._pinned)
        _flat(self._recorded[name], values).copy_(values, non_blocking=True)

    def read(self, lanes: int) -> tuple[HostOutputs, float | None]:
        """Results of the first `lanes` lanes, waited for, and the step's seconds on the device where it keeps time."""
        outputs, seconds = self._outputs, None
        assert outputs is not None, "a ring slot is read after its step was started"
        if self._began is not None and self._ended is not None:
            self._ended.synchronize()
            seconds = self._began.elapsed_time(self._ended) / 1e3
        signals = None if outputs.signals is None else _flat(self._signals, outputs.signals)[:lanes]
        host = HostOutputs.read(_flat(self._counts, outputs.counts)[:lanes], signals, outputs)
        if outputs.features is not None and outputs.drafted is not None:
            host.draft.features = _flat(self._recorded["features"], outputs.features)[:lanes].clone()
            host.draft.tokens = _flat(self._recorded["drafted"], outputs.drafted)[:lanes].clone()
        return host, seconds


class OutputRing:
    """As many slots as steps may be in flight or being read: results of step t are read while step t+1 runs."""

    SLOTS = 2

    def __init__(self, lanes: int, width: int, device: torch.device) -> None:
        self._slots = [RingSlot(lanes, width, device) for _ in range(self.SLOTS)]
        self._next = 0

    def take(self) -> RingSlot:
        """The slot of the next step."""
        slot = self._slots[self._next]
        self._next = (self._next + 1) % self.SLOTS
        return slot


def _flat(memory: Tensor, like: Tensor) -> Tensor:
    return memory[: like.numel()].view(like.shape)
