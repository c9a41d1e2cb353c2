"""The decode step of decode_step.py on SGLang's objects.

SGLang's DFLASH worker owns models, caches, prompts and what passes between steps; this one replaces its decode step:

    anchors ─► drafter ─► q ─► k ─► pack ─► target ─► accept ─► draft keys of the verified rows
    (N,)       (N, W)                (M,)    (M, V)    (N,)      (M,)

with M = rows · N, so that SGLang's graphs are captured for `rows` tokens a request in place of W.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.distributed import get_tp_group
from sglang.srt.managers.scheduler import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.server_args import get_global_server_args
from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from torch import Tensor

import dscale
from dscale.config import AnchorLayout, require
from dscale.integrations.sglang import attention
from dscale.integrations.sglang.counters import Counters
from dscale.integrations.sglang.drafts import Drafts, Head
from dscale.integrations.sglang.settings import Settings
from dscale.integrations.sglang.verify import RaggedVerifyInput, Requests, choose
from dscale.models.drafter_config import read_drafter_config
from dscale.speculation.acceptance import accept
from dscale.speculation.packing import Packed, PackedRows, pack_rows
from dscale.speculation.policies import Draft

logger = logging.getLogger(__name__)


class DScaleWorker(DFlashWorkerV2):
    """SGLang's draft worker with this project's decode step."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.settings = Settings.read()
        require_layout(self.draft_model_runner.model_config.hf_config.to_dict())
        target = self.model_runner
        group = get_tp_group()
        self.group = group if group.world_size > 1 else None
        vocab = int(target.model_config.vocab_size)
        self.drafts = Drafts(self.settings, self.block_size, Head.of(target.model.lm_head, vocab, self.group))
        self.requests = Requests(vocab, self.device)
        simulated = self.settings.simulated
        self.simulation = None if simulated is None else simulated.on(self.device)
        self.counters = Counters(self.block_size, self.drafts.rows, bool(self.server_args.enable_metrics))
        self.draft_model.forward = _in_own_dtype(self.draft_model)

    def init_attention_backends(self) -> None:
        """The drafter attends by this project's kernel too."""
        self.draft_model_runner.server_args.attention_backend = attention.NAME
        super().init_attention_backends()
        for runner in (self.model_runner, self.draft_model_runner):
            backend = getattr(runner.attn_backend, "decode_backend", runner.attn_backend)
            served = isinstance(backend, attention.DScaleAttention)
            require(served, f"DSCALE: attention backend {type(backend).__name__} verifies, dscale is needed")
        self._announce()

    def _announce(self) -> None:
        """Say that the plug-in serves: in the log, and in /server_info for who wants to be sure."""
        about = {
            "version": dscale.__version__,
            "policy": self.settings.policy,
            "rows": self.drafts.rows,
            "width": self.block_size,
            "simulated": bool(self.settings.simulate),
        }
        get_global_server_args().dscale = about
        if self.tp_rank == 0:
            logger.info("DSCALE is active: %s", about)

    def forward_batch_generation(self, model_worker_batch: Any, on_publish: Any = None) -> GenerationBatchResult:
        """Prompts go SGLang's way, decoding this project's."""
        batch = model_worker_batch
        mode = batch.forward_mode
        if mode.is_extend() or batch.is_extend_in_batch or mode.is_idle() or batch.spec_info is None:
            return super().forward_batch_generation(batch, on_publish)
        with torch.inference_mode():
            return self._decode(batch, on_publish)

    def _validate_phase1_sampling_support(self, model_worker_batch: Any) -> None:
        """SGLang's DFLASH warns where it would verify sampled requests greedily; here they are sampled everywhere."""

    def _decode(self, batch: Any, on_publish: Any) -> GenerationBatchResult:
        carried, context = batch.spec_info, batch.seq_lens
        if context.is_cuda:  # made on another stream
            context.record_stream(torch.cuda.current_stream())
        self.requests.update(batch)
        anchor, lanes = carried.verified_id.long(), batch.req_pool_indices.long()
        live = torch.ones_like(lanes, dtype=torch.bool)
        planned = self._planned(batch)

        draft = self._draft(batch, planned, anchor, context, lanes, live)
        k = self.drafts.lengths(draft, live)
        if self.group is not None:
            draft, k = self._agree(draft, k)
        table = self.model_runner.req_to_token_pool.req_to_token
        rows = self.drafts.rows * lanes.shape[0]
        packed, flat = pack_rows(k, rows, anchor, draft.tokens, context, table, lanes, page_size=1)

        output, captured = self._verify(batch, planned, packed, flat)
        y = choose(output.next_token_logits, batch.sampling_info, self.requests, packed, flat)
        if self.simulation is not None:
            y = self.simulation.rewrite(y, draft, packed, self.requests.vocab)
        outcome = accept(draft.tokens, k, y, packed.starts)
        lengths = context + outcome.emitted
        if on_publish is not None:
            on_publish(lengths)
        self._append_target_hidden_to_draft_kv_by_loc(
            target_hidden=output.hidden_states, cache_loc=flat.slots, positions=flat.positions
        )
        output.hidden_states = None
        following = self._make_next_draft_input_decode(
            verified_id=outcome.next_anchor, new_seq_lens=lengths,
            cur_allocated_seq_lens_cpu=carried.reserved_seq_lens_cpu,
        )  # fmt: skip
        following.verify_done = torch.get_device_module(self.device).Event()
        following.verify_done.record()
        return GenerationBatchResult(
            logits_output=output, next_token_ids=outcome.tokens.flatten(), accept_lens=outcome.emitted.int(),
            can_run_cuda_graph=captured, next_draft_input=following, speculative_num_draft_tokens=self.block_size,
            new_seq_lens=lengths,
        )  # fmt: skip

    def _draft(
        self, batch: Any, planned: tuple[Tensor, int], anchor: Tensor, context: Tensor, lanes: Tensor, live: Tensor
    ) -> Draft:
        """One pass of the drafter over [anchor, mask, …]; slot 0 of its rows predicts nothing (layout 1+N)."""
        count, width = lanes.shape[0], self.block_size
        ids = torch.full((count, width), self._mask_token_id, device=anchor.device)
        ids[:, 0] = anchor
        positions = context[:, None] + self._block_pos_offsets
        slots = self.model_runner.req_to_token_pool.req_to_token[lanes[:, None], positions]
        embedding = self.model_runner.model.get_input_embeddings()
        known, total = planned
        block = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY, batch_size=count, input_ids=ids.flatten(),
            req_pool_indices=batch.req_pool_indices, seq_lens=context, seq_lens_cpu=known, seq_lens_sum=total,
            out_cache_loc=slots.flatten().long(), positions=positions.flatten(),
            input_embeds=embedding(ids.flatten()),
            spec_algorithm=SpeculativeAlgorithm.DFLASH, spec_info=self._draft_block_spec_info,
            capture_hidden_mode=CaptureHiddenMode.NULL,
        )  # fmt: skip
        hidden = self.draft_model_runner.forward(block).logits_output.hidden_states.view(count, width, -1)
        draft = self.drafts.read(hidden[:, 1:], live, self.requests.initial(batch))
        return draft if self.simulation is None else self.simulation.believe(draft, self.requests.seeds, context)

    def _planned(self, batch: Any) -> tuple[Tensor, int]:
        """Upper bounds of the committed lengths that the host knows, and their sum (SGLang plans with them)."""
        carried = batch.spec_info
        if carried.planning_seq_lens_cpu is not None:
            return carried.planning_seq_lens_cpu, int(carried.planning_seq_lens_sum)
        known = batch.seq_lens_cpu if batch.seq_lens_cpu is not None else batch.seq_lens.cpu()
        return known, int(known.sum())

    def _agree(self, draft: Draft, k: Tensor) -> tuple[Draft, Tensor]:
        """Rank 0 decides drafts and lengths for all."""
        assert self.group is not None
        decided = self.group.broadcast(torch.cat([draft.tokens, k[:, None]], dim=1), src=0)
        draft.tokens = decided[:, :-1]
        return draft, decided[:, -1]

    def _verify(self, batch: Any, planned: tuple[Tensor, int], packed: Packed, flat: PackedRows) -> tuple[Any, bool]:
        """The target over the packed rows: its output with logits [M, V] and taps [M, T·H]; whether a graph ran."""
        info = RaggedVerifyInput(
            draft_token=flat.ids,
            positions=flat.positions,
            draft_token_num=self.drafts.rows,
            custom_mask=None,
            capture_hidden_mode=CaptureHiddenMode.FULL,
            starts=packed.starts,
        )
        before = batch.seq_lens_cpu, batch.seq_lens_sum
        batch.seq_lens_cpu, batch.seq_lens_sum = planned
        batch.out_cache_loc = flat.slots
        rows, _ = info.prepare_for_verify(batch, self.target_worker)
        batch.seq_lens_cpu, batch.seq_lens_sum = before
        out = self.target_worker.forward_batch_generation(
            batch=None, forward_batch=rows, is_verify=True, skip_attn_backend_init=True
        )
        return out.logits_output, out.can_run_cuda_graph

    def on_verify_complete_cpu(self, num_correct_drafts_per_req: list[int], batch_size: int = 0) -> None:
        """A step's outcome on the host."""
        self.counters.add(num_correct_drafts_per_req)


def require_layout(config: dict[str, Any]) -> None:
    """InputError unless the drafter's slot 0 predicts nothing: SGLang's DFLASH would shift other drafters by one."""
    layout = read_drafter_config(config, "drafter").config.layout
    masked = layout is AnchorLayout.MASKED
    require(masked, f"drafter: its layout is {layout.value}; on SGLang only {AnchorLayout.MASKED.value} is served")


def _in_own_dtype(drafter: torch.nn.Module) -> Callable[..., Any]:
    """The drafter's forward. SGLang hands every eager model bfloat16 embeddings, a float32 one cannot take them; a
    wrapper keeps the signature, by which SGLang asks what a model takes."""
    projection: Any = drafter.fc
    plain, dtype = drafter.forward, projection.weight.dtype

    @functools.wraps(plain)
    def forward(*given: Any, **named: Any) -> Any:
        rows = named.get("input_embeds")
        if rows is not None and rows.dtype is not dtype:
            named["input_embeds"] = rows.to(dtype)
        return plain(*given, **named)

    return forward
