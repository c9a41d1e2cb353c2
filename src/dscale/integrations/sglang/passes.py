"""Both models' passes over memory of the step alone, for steps that are captured whole.

SGLang's own runners copy a batch into buffers, plan on the host and replay a graph for each pass. Here a pass is a call
of the model with the tensors of the step; the attention backend, which is this project's, is told how the rows lie.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from torch import Tensor

from dscale.integrations.sglang.attention import DScaleAttention
from dscale.integrations.sglang.stages import Decision, Lanes, Settled
from dscale.integrations.sglang.verify import RaggedVerifyInput
from dscale.kernels.top_logits import argmax

if TYPE_CHECKING:
    from dscale.integrations.sglang.worker import DScaleWorker


def backend_of(runner: Any) -> Any:
    """The attention backend that verifies for a model runner."""
    return getattr(runner.attn_backend, "decode_backend", runner.attn_backend)


class Passes:
    """`step` is the whole decode step of greedy requests. kept: memory that captured steps write to and others own."""

    def __init__(self, worker: DScaleWorker) -> None:
        self.worker, self.stages = worker, worker.stages
        self.kept: list[Any] = []

    def step(self, lanes: Lanes) -> Settled:
        """Draft, decide, verify, settle, and the drafter's keys of the verified rows."""
        hidden = self._draft(lanes)
        decision = self.stages.decide(hidden, lanes)
        logits, taps = self._verify(lanes, decision)
        settled = self.stages.settle(argmax(logits), decision, lanes.context)
        self.worker._append_target_hidden_to_draft_kv_by_loc(
            target_hidden=taps, cache_loc=decision.flat.slots, positions=decision.flat.positions
        )
        self._keep()
        return settled

    def _draft(self, lanes: Lanes) -> Tensor:
        """Hidden rows [N, W, H] of the drafter."""
        worker, block = self.worker, self.stages.block(lanes)
        runner = worker.draft_model_runner
        starts = torch.arange(lanes.count + 1, device=block.ids.device) * self.stages.width
        embedded = worker.model_runner.model.get_input_embeddings()(block.ids)
        batch = self._batch(
            lanes, block.ids, block.positions, block.slots, worker._draft_block_spec_info, CaptureHiddenMode.NULL
        )
        with self._over(runner, starts, lanes):
            out = runner.model.forward(block.ids, block.positions, batch, input_embeds=embedded)
        return out.hidden_states.view(lanes.count, self.stages.width, -1)

    def _verify(self, lanes: Lanes, decision: Decision) -> tuple[Tensor, Tensor]:
        """Logits [M, V] and taps [M, T·H] of the target."""
        flat, runner = decision.flat, self.worker.model_runner
        info = RaggedVerifyInput(
            draft_token=flat.ids,
            positions=flat.positions,
            draft_token_num=self.stages.drafts.rows,
            capture_hidden_mode=CaptureHiddenMode.FULL,
            starts=decision.packed.starts,
        )
        batch = self._batch(lanes, flat.ids, flat.positions, flat.slots, info, CaptureHiddenMode.FULL)
        with self._over(runner, decision.packed.starts, lanes), _own_logits(runner.model):
            out = runner.model.forward(flat.ids, flat.positions, batch)
        return out.next_token_logits, out.hidden_states

    def _batch(
        self, lanes: Lanes, ids: Tensor, positions: Tensor, slots: Tensor, info: Any, hidden: CaptureHiddenMode
    ) -> ForwardBatch:
        return ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY, batch_size=lanes.count, input_ids=ids,
            req_pool_indices=lanes.rows, seq_lens=lanes.context, seq_lens_sum=0, orig_seq_lens=lanes.context,
            out_cache_loc=slots, positions=positions, spec_algorithm=SpeculativeAlgorithm.DFLASH, spec_info=info,
            capture_hidden_mode=hidden, global_forward_mode=ForwardMode.TARGET_VERIFY,
        )  # fmt: skip

    @contextmanager
    def _over(self, runner: Any, starts: Tensor, lanes: Lanes) -> Iterator[None]:
        """The rows of a pass lie at starts, behind lanes.context tokens."""
        backend: DScaleAttention = backend_of(runner)
        before = backend.batch
        backend.batch = backend.over(starts, lanes.context, lanes.rows)
        try:
            with forward_context(ForwardContext(attn_backend=runner.attn_backend)):
                yield
        finally:
            backend.batch = before

    def _keep(self) -> None:
        """SGLang's workspace for the drafter's keys may be replaced by a larger one; graphs go on writing to this."""
        fused = self.worker._fused_kv_helper
        names = ("_proj_workspace", "_k_workspace", "_v_workspace")
        for space in [getattr(fused, name, None) for name in names]:
            if space is not None and all(space is not one for one in self.kept):
                self.kept.append(space)


@contextmanager
def _own_logits(model: Any) -> Iterator[None]:
    """Logits as the head makes them. SGLang copies them to float32 for its samplers; the highest one is the same."""
    processor = getattr(model, "logits_processor", None)
    if processor is None or not hasattr(processor, "_copy_logits_to_buffer") or processor.final_logit_softcapping:
        yield
        return
    processor._copy_logits_to_buffer = lambda logits, metadata, **_: logits[:, : processor.vocab_size]
    try:
        yield
    finally:
        del processor._copy_logits_to_buffer
