"""The attention backend `dscale` for SGLang: the packed, ragged Triton kernel of kernels/attention.py on its pools.

SGLang keeps one key row a token, [slots, kv, d], and tells where a request's tokens lie in req_to_token [rows,
positions]. That is a cache of pages of one token, [slots, kv, 1, d], with req_to_token as its page table: the kernel
takes both as they are, whatever --page-size is, and nothing is gathered per step.

All modes are served: verification (ragged where the spec info has `starts`), draft blocks, prompts and plain decoding.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch import Tensor

from dscale.config import InputError, require
from dscale.integrations.sglang.settings import Settings
from dscale.kernels.attention import AttentionOptions, Path, RaggedBatch, arrival_counters, paged_attention

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

NAME = "dscale"


class DScaleAttention(AttentionBackend):
    """One object a model runner. `batch` says how the rows of the running forward pass lie."""

    needs_cpu_seq_lens = False

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__()
        self.pool = runner.token_to_kv_pool
        self.table: Tensor = runner.req_to_token_pool.req_to_token
        self.device = torch.device(runner.device)
        self.width = int(runner.server_args.speculative_num_draft_tokens or 1)
        self.heads = int(runner.model_config.num_attention_heads)
        deterministic = bool(runner.server_args.enable_deterministic_inference)
        self.options = AttentionOptions(Settings.read().attention_layout, deterministic)
        self.batch: RaggedBatch | None = None
        self._arrivals: Tensor | None = None
        if self.table.dtype is not torch.int32:
            raise InputError(f"attention backend dscale: req_to_token is {self.table.dtype}, int32 is needed")

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """How the rows of an eager pass lie."""
        mode, lengths = forward_batch.forward_mode, forward_batch.seq_lens
        lanes = forward_batch.req_pool_indices
        if mode.is_target_verify():
            starts = self._verify_starts(forward_batch)
            self.batch = self._ragged(starts, lengths, lanes, self.width)
        elif mode.is_decode_or_idle():
            starts = torch.arange(lanes.shape[0] + 1, device=self.device)
            self.batch = self._ragged(starts, lengths - 1, lanes, 1)
        elif mode.is_draft_extend_v2():
            raise InputError("attention backend dscale: serves DSCALE, DFLASH and no speculation, not this algorithm")
        else:
            counts = forward_batch.extend_seq_lens
            starts = torch.nn.functional.pad(counts.long().cumsum(0), (1, 0))
            most = max(forward_batch.extend_seq_lens_cpu or [int(counts.max())])
            self.batch = self._ragged(starts, forward_batch.extend_prefix_lens, lanes, most, "prefill")

    def _verify_starts(self, forward_batch: Any) -> Tensor:
        """Of a ragged pass, or as many rows for each request: draft blocks, and passes that SGLang makes up."""
        starts: Tensor | None = getattr(forward_batch.spec_info, "starts", None)
        if starts is not None:
            return starts
        lanes = forward_batch.batch_size
        each = forward_batch.input_ids.shape[0] // max(lanes, 1)
        require(each <= self.width, f"attention backend dscale: {each} rows a request, at most {self.width} were told")
        return torch.arange(lanes + 1, device=self.device) * each

    def _ragged(self, starts: Tensor, contexts: Tensor, lanes: Tensor, most: int, path: Path = "auto") -> RaggedBatch:
        contexts = contexts.long()
        bound = self.table.shape[1] if self.device.type != "cpu" else int(contexts.max()) + most
        return RaggedBatch(
            positions=starts, slots=starts,  # of the writers, which SGLang has of its own
            page_table=self.table, lanes=lanes.long(), starts=starts, contexts=contexts,
            max_rows=most, max_context=bound, path=path, options=self.options,
        )  # fmt: skip

    def over(self, starts: Tensor, contexts: Tensor, lanes: Tensor) -> RaggedBatch:
        """Rows of a step that is captured whole: int64 [N+1], [N], [N] of its own memory."""
        batch = self._ragged(starts, contexts, lanes, self.width)
        return batch if self._arrivals is None else replace(batch, arrivals=self._arrivals)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Memory that captured launches read, for at most max_bs requests."""
        self._starts = torch.zeros(max_bs + 1, dtype=torch.int64, device=self.device)
        self._contexts, self._lanes = torch.zeros(2, max_bs, dtype=torch.int64, device=self.device)
        self._arrivals = arrival_counters(max_bs, self.width, self.heads, self.device)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Fill that memory; in capture also say how the captured rows lie."""
        lanes, mode = forward_batch.batch_size, forward_batch.forward_mode
        if mode.is_target_verify():
            starts, most, back = self._verify_starts(forward_batch), self.width, 0
        elif mode.is_decode_or_idle():
            starts, most, back = torch.arange(lanes + 1, device=self.device), 1, 1
        else:
            raise InputError(f"attention backend dscale: graphs of mode {mode} are not captured")
        known = starts.shape[0]
        self._starts[:known].copy_(starts)
        self._starts[known : lanes + 1] = starts[-1:]  # requests that only fill the bucket have no rows
        torch.sub(forward_batch.seq_lens[:lanes], back, out=self._contexts[:lanes])
        self._lanes[:lanes].copy_(forward_batch.req_pool_indices[:lanes])
        if in_capture:
            batch = self._ragged(self._starts[: lanes + 1], self._contexts[:lanes], self._lanes[:lanes], most)
            self.batch = replace(batch, arrivals=self._arrivals)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Length of requests that only fill a bucket."""
        return 1

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **unknown: Any,
    ) -> Tensor:
        """Keys and values [R, kv, d] go to their slots, then the rows q [R, heads·d] attend → [R, heads·d]."""
        extra = [name for name, value in unknown.items() if value is not None]
        require(not extra, f"attention backend dscale: {extra} are not supported")
        require(not layer.logit_cap, f"attention backend dscale: a logit cap of {layer.logit_cap} is not supported")
        if save_kv_cache and k is not None and v is not None:
            scales = () if layer.k_scale is None else (layer.k_scale, layer.v_scale)
            self.pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc), k, v, *scales)
        keys, values = self.pool.get_kv_buffer(layer.layer_id)
        assert self.batch is not None
        batch = replace(self.batch, causal=layer.attn_type is not AttentionType.ENCODER_ONLY)
        window = layer.sliding_window_size + 1 if layer.sliding_window_size >= 0 else None  # theirs leaves out the row
        out = paged_attention(
            q.view(-1, layer.tp_q_head_num, layer.head_dim), keys.unsqueeze(2), values.unsqueeze(2), batch,
            layer.scaling, window, layer.k_scale_float or 1.0, layer.v_scale_float or 1.0,
        )  # fmt: skip
        return out.flatten(1)

    def forward_decode(self, *arguments: Any, **named: Any) -> Tensor:
        """Plain decoding is verification of one row a request."""
        return self.forward_extend(*arguments, **named)


def build(runner: ModelRunner) -> DScaleAttention:
    """The backend of a model runner, or InputError where it cannot serve the model."""
    config = runner.model_config
    require(not config.is_encoder_decoder, "attention backend dscale: cross attention is not supported")
    pool = type(runner.token_to_kv_pool).__name__
    known = pool == "MHATokenToKVPool"
    require(known, f"attention backend dscale: pool {pool}; only a pool of keys and values a token is served")
    size = config.head_dim
    good = 16 <= size <= 256 and size & (size - 1) == 0
    require(good or runner.device == "cpu", f"attention backend dscale: head size {size}; powers of two up to 256")
    return DScaleAttention(runner)
