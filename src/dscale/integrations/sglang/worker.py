"""The decode step of decode_step.py on SGLang's objects.

SGLang's DFLASH worker owns models, caches, prompts and what passes between steps; this one replaces its decode step:

    anchors ─► drafter ─► q ─► k ─► pack ─► target ─► accept ─► draft keys of the verified rows
    (N,)       (N, W)                (M,)    (M, V)    (N,)      (M,)

with M = rows · N, so that SGLang's graphs are captured for `rows` tokens a request in place of W. Steps of greedy
requests are captured whole (passes.py, graphs.py); others are launched piece by piece, passes as SGLang's graphs.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.distributed import get_tp_group
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.scheduler import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.model_executor.runner import model_capture_mode
from sglang.srt.model_executor.runner.base_cuda_graph_runner import freeze_gc
from sglang.srt.server_args import get_global_server_args
from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from torch import Tensor

import dscale
from dscale.config import AnchorLayout, require
from dscale.engine.graphs import CudaCapture, buckets
from dscale.integrations.sglang import attention, compat
from dscale.integrations.sglang.counters import Counters
from dscale.integrations.sglang.drafts import Drafts, Head
from dscale.integrations.sglang.fence import Fence
from dscale.integrations.sglang.graphs import Rerun, StepGraphs
from dscale.integrations.sglang.passes import Passes, backend_of
from dscale.integrations.sglang.ranks import RankCheck
from dscale.integrations.sglang.settings import Settings
from dscale.integrations.sglang.stages import Decision, Lanes, Settled, Stages, decided_together
from dscale.integrations.sglang.verify import RaggedVerifyInput, Requests, choose, greedy
from dscale.models.drafter_config import read_drafter_config
from dscale.speculation.transfer import place_tensor

logger = logging.getLogger(__name__)


class DScaleWorker(DFlashWorkerV2):
    """SGLang's draft worker with this project's decode step."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.settings = Settings.read()
        require_layout(self.draft_model_runner.model_config.hf_config.to_dict())
        target = self.model_runner
        group = get_tp_group()
        self.first = group.rank_in_group == 0
        self.group = group if group.world_size > 1 else None
        self.check = RankCheck(group) if self.group is not None and self.settings.check_ranks else None
        vocab = int(target.model_config.vocab_size)
        self.drafts = Drafts(self.settings, self.block_size, Head.of(target.model.lm_head, vocab, self.group))
        self.requests = Requests(vocab, self.device)
        self.cuda = torch.device(self.device).type == "cuda"
        self.ahead = self.cuda and bool(self.settings.ahead)
        self.graphs: StepGraphs | None = None
        self.counters = Counters(self.block_size, self.drafts.rows, bool(self.server_args.enable_metrics))
        self.draft_model.forward = _in_own_dtype(self.draft_model)

    def init_attention_backends(self) -> None:
        """The drafter attends by this project's kernel too."""
        drafter = self.draft_model_runner.server_args
        compat.assign(drafter, attention_backend=attention.NAME, speculative_draft_attention_backend=attention.NAME)
        super().init_attention_backends()
        table, simulated = self.model_runner.req_to_token_pool.req_to_token, self.settings.simulated
        simulation = None if simulated is None else simulated.on(self.device)
        self.stages = Stages(self.drafts, table, self._mask_token_id, simulation)
        for runner in (self.model_runner, self.draft_model_runner):
            backend = backend_of(runner)
            served = isinstance(backend, attention.DScaleAttention)
            require(served, f"DSCALE: attention backend {type(backend).__name__} verifies, dscale is needed")
        self._announce()

    def init_cuda_graphs(self) -> None:
        """SGLang's, for prompts and for steps that are not captured whole; then whole steps."""
        super().init_cuda_graphs()
        reason = self._uncaptured()
        if reason is None:
            self.graphs = self._capture()
        elif self.cuda and self.first:
            logger.info("DSCALE: decode steps are not captured whole: %s", reason)
        get_global_server_args().dscale["graphs"] = 0 if self.graphs is None else len(self.graphs.buckets)

    def _uncaptured(self) -> str | None:
        """Why decode steps are launched piece by piece, or None."""
        args = self.server_args
        reasons = {
            "DSCALE_GRAPHS=0": self.settings.graphs == 0,
            "--disable-cuda-graph": self.cuda and args.disable_cuda_graph,
            "a CPU": not self.cuda and self.settings.graphs < 2,
            "several ranks": self.group is not None,
            "LoRA": args.enable_lora,
            "positions in three dimensions": compat.three_dimensional(self.model_runner),
        }
        return next((reason for reason, holds in reasons.items() if holds), None)

    def _capture(self) -> StepGraphs | None:
        """Steps of up to as many requests as SGLang captures; None, with a warning, where that fails."""
        most = max(self.model_runner.decode_cuda_graph_runner.capture_bs) if self.cuda else 4
        device = self.stages.table.device
        backend = CudaCapture(device) if self.cuda else Rerun()
        graphs = StepGraphs(Passes(self).step, buckets(most), self.block_size, backend, device)
        try:
            with freeze_gc(self.server_args.enable_cudagraph_gc), model_capture_mode():
                counters = graphs.prepare()
        except Exception as error:  # whatever a model or a kernel cannot do in a capture: it is served without
            text = "DSCALE: decode steps are launched piece by piece, capturing failed: %r"
            logger.warning(text, error, exc_info=True)
            return None
        logger.info("DSCALE: whole decode steps of up to %d requests: %s", most, counters)
        return graphs

    def _announce(self) -> None:
        """Say that the plug-in serves: in the log, and in /server_info for who wants to be sure."""
        about = {
            "version": dscale.__version__,
            "policy": self.settings.policy,
            "rows": self.drafts.rows,
            "width": self.block_size,
            "simulated": bool(self.settings.simulate),
        }
        if self.settings.check_ranks:
            about["steps_compared"] = 0
        compat.assign(get_global_server_args(), dscale=about)
        if self.first:
            logger.info("DSCALE is active: %s", about)

    def forward_batch_generation(self, model_worker_batch: Any, on_publish: Any = None) -> GenerationBatchResult:
        """Prompts pass the target SGLang's way, decoding is this project's."""
        batch = model_worker_batch
        mode = batch.forward_mode
        if mode.is_extend() and batch.extend_lens and not batch.return_logprob:
            return self._prefill(batch, on_publish)
        if mode.is_extend() or batch.is_extend_in_batch or mode.is_idle() or batch.spec_info is None:
            return super().forward_batch_generation(batch, on_publish)
        with torch.inference_mode():
            return self._decode(batch, on_publish)

    def _prefill(self, batch: Any, on_publish: Any) -> GenerationBatchResult:
        """The target's pass over prompts, and the drafter's keys of their rows; the host waits for neither."""
        result = compat.pass_over_prompts(self.target_worker, batch)
        result.new_seq_lens = batch.seq_lens
        if on_publish is not None:
            on_publish(batch.seq_lens)
        spans = zip(batch.prefix_lens, batch.extend_lens, strict=True)
        known = torch.cat([torch.arange(first, first + count) for first, count in spans])
        positions = torch.empty(known.shape, dtype=known.dtype, device=self.device)
        place_tensor(known, positions)
        self._append_target_hidden_to_draft_kv_by_loc(
            target_hidden=result.logits_output.hidden_states, cache_loc=batch.out_cache_loc, positions=positions
        )
        result.logits_output.hidden_states = None
        result.next_draft_input = compat.carry(self, result.next_token_ids, batch.seq_lens, self._done)
        return result

    def _maybe_build_draft_sampler(self) -> None:
        """SGLang 0.5.16 would have the drafter's graphs take the highest logits too, which nobody would read."""

    def _validate_phase1_sampling_support(self, batch: Any) -> None:
        """SGLang's DFLASH warns where it would verify sampled requests greedily; here they are sampled everywhere."""

    def _decode(self, batch: Any, on_publish: Any) -> GenerationBatchResult:
        anchor, context = compat.anchors(batch.spec_info), batch.seq_lens
        if context.is_cuda:  # made on another stream
            context.record_stream(torch.cuda.current_stream())
        self.requests.update(batch)
        count = context.shape[0]
        seeds, initial = self.requests.seeds, self.requests.initial(batch)
        if self.graphs is not None and self.graphs.fits(count) and greedy(batch.sampling_info):
            given = Lanes(anchor, context, batch.req_pool_indices, seeds, initial, initial)
            settled, output, captured = self.graphs.run(given), LogitsProcessorOutput(next_token_logits=None), True
            if on_publish is not None:
                on_publish(settled.length)
        else:
            live = torch.ones(count, dtype=torch.bool, device=context.device)
            rows = batch.req_pool_indices.long()
            lanes = Lanes(anchor.long(), context.long(), rows, seeds, initial, live)
            settled, output, captured = self._launch(batch, lanes, on_publish)
        following = compat.carry(self, settled.anchor, settled.length, self._done)
        return GenerationBatchResult(
            logits_output=output, next_token_ids=settled.tokens.flatten(), accept_lens=settled.emitted,
            can_run_cuda_graph=captured, next_draft_input=following, speculative_num_draft_tokens=self.block_size,
            new_seq_lens=settled.length,
        )  # fmt: skip

    def _launch(self, batch: Any, lanes: Lanes, on_publish: Any) -> tuple[Settled, Any, bool]:
        """A step launched piece by piece, its two passes by SGLang's runners: what it made, the target's output, and
        whether SGLang replayed a graph for that."""
        planned = compat.planned(batch, self.block_size)
        hidden = self._draft(batch, planned, lanes)
        decision = self.stages.decide(hidden, lanes, None if self.group is None else self._agree)
        output, captured = self._verify(batch, planned, decision)
        logits, sampling = output.next_token_logits, batch.sampling_info
        y = choose(logits, sampling, self.requests, decision.packed, decision.flat)
        settled = self.stages.settle(y, decision, lanes.context)
        self._compare(batch, lanes, settled)
        if on_publish is not None:
            on_publish(settled.length)
        self._append_target_hidden_to_draft_kv_by_loc(
            target_hidden=output.hidden_states, cache_loc=decision.flat.slots, positions=decision.flat.positions
        )
        output.hidden_states = None
        return settled, output, captured

    def _done(self) -> Any:
        """An event that the step has ended."""
        event = Fence() if self.ahead else torch.get_device_module(self.device).Event()
        event.record()
        return event

    def _draft(self, batch: Any, planned: tuple[Tensor, int], lanes: Lanes) -> Tensor:
        """Hidden rows [N, W, H] of one pass of the drafter over [anchor, mask, …]."""
        block = self.stages.block(lanes)
        embedding = self.model_runner.model.get_input_embeddings()
        known, total = planned
        forward = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY, batch_size=lanes.count, input_ids=block.ids,
            req_pool_indices=batch.req_pool_indices, seq_lens=lanes.context, seq_lens_cpu=known, seq_lens_sum=total,
            out_cache_loc=block.slots, positions=block.positions, input_embeds=embedding(block.ids),
            spec_algorithm=SpeculativeAlgorithm.DFLASH, spec_info=self._draft_block_spec_info,
            capture_hidden_mode=CaptureHiddenMode.NULL,
        )  # fmt: skip
        out = self.draft_model_runner.forward(forward).logits_output
        return out.hidden_states.view(lanes.count, self.block_size, -1)

    def _agree(self, drafts: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Rank 0 decides drafts and lengths for all."""
        assert self.group is not None
        group = self.group
        return decided_together(drafts, k, lambda message: group.broadcast(message, src=0))

    def _compare(self, batch: Any, lanes: Lanes, settled: Settled) -> None:
        """With DSCALE_CHECK_RANKS on several ranks: they all made this of the step, or RanksDiffer."""
        if self.check is not None:
            self.check.compare([request.rid for request in batch.reqs], lanes, settled)
            get_global_server_args().dscale["steps_compared"] = self.check.steps

    def _verify(self, batch: Any, planned: tuple[Tensor, int], decision: Decision) -> tuple[Any, bool]:
        """The target over the packed rows: its output with logits [M, V] and taps [M, T·H]; whether a graph ran."""
        packed, flat = decision.packed, decision.flat
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
