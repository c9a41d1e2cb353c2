"""The backend `dscale` on a made-up runner: what a captured pass reads, against an eager pass. Where SGLang is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("sglang")
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from dscale.integrations.sglang.attention import DScaleAttention

HEADS, KV, SIZE, WIDTH, SLOTS, POSITIONS = 4, 2, 16, 8, 200, 48


class Pool:
    """Keys and values [slots, kv, d] of one layer."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.keys, self.values = torch.randn(2, SLOTS, KV, SIZE, generator=generator)

    def get_kv_buffer(self, layer: int) -> tuple[Tensor, Tensor]:
        return self.keys, self.values

    def set_kv_buffer(self, layer: Any, where: Any, keys: Tensor, values: Tensor) -> None:
        self.keys[where.loc], self.values[where.loc] = keys, values


def backend() -> DScaleAttention:
    generator = torch.Generator().manual_seed(1)
    table = torch.stack([torch.randperm(SLOTS - 1, generator=generator)[:POSITIONS] + 1 for _ in range(5)]).int()
    arguments = SimpleNamespace(speculative_num_draft_tokens=WIDTH, enable_deterministic_inference=False)
    runner: Any = SimpleNamespace(
        token_to_kv_pool=Pool(), req_to_token_pool=SimpleNamespace(req_to_token=table), device="cpu",
        server_args=arguments, model_config=SimpleNamespace(num_attention_heads=HEADS),
    )  # fmt: skip
    return DScaleAttention(runner)


def layer(kind: AttentionType = AttentionType.DECODER, window: int = -1) -> Any:
    return SimpleNamespace(
        logit_cap=0.0, k_scale=None, k_scale_float=None, v_scale_float=None, layer_id=0, attn_type=kind,
        sliding_window_size=window, tp_q_head_num=HEADS, head_dim=SIZE, scaling=SIZE**-0.5,
    )  # fmt: skip


def plain(made: DScaleAttention, q: Tensor, lanes: list[int], counts: list[int], contexts: list[int]) -> Tensor:
    """Causal attention row by row from the pool."""
    rows, out = q.view(-1, HEADS, SIZE), []
    at = 0
    for lane, count, context in zip(lanes, counts, contexts, strict=True):
        for row in range(count):
            slots = made.table[lane, : context + row + 1].long()
            keys = made.pool.keys[slots].repeat_interleave(HEADS // KV, 1)
            values = made.pool.values[slots].repeat_interleave(HEADS // KV, 1)
            weight = torch.softmax(torch.einsum("hd,shd->hs", rows[at], keys) * SIZE**-0.5, dim=-1)
            out.append(torch.einsum("hs,shd->hd", weight, values))
            at += 1
    return torch.stack(out).flatten(1)


@torch.inference_mode()
def test_a_padded_bucket_reads_what_the_live_requests_are() -> None:
    made, lanes, counts, contexts = backend(), [3, 1, 4], [2, 5, 1], [9, 17, 30]
    made.init_cuda_graph_state(max_bs=4, max_num_tokens=16)
    bucket = SimpleNamespace(
        forward_mode=ForwardMode.TARGET_VERIFY, batch_size=4, input_ids=torch.zeros(16), spec_info=None,
        req_pool_indices=torch.tensor([0, 0, 0, 0]), seq_lens=torch.ones(4, dtype=torch.int64),
    )  # fmt: skip
    made.init_forward_metadata_out_graph(bucket, in_capture=True)
    captured = made.batch
    assert captured is not None
    assert captured.starts.tolist() == [0, 4, 8, 12, 16]  # as many rows for each of the requests

    starts = torch.tensor([0, 2, 7, 8])
    bucket.spec_info = SimpleNamespace(starts=starts)
    bucket.req_pool_indices, bucket.seq_lens = torch.tensor([*lanes, 0]), torch.tensor([*contexts, 1])
    made.init_forward_metadata_out_graph(bucket)
    assert made.batch is captured
    assert captured.starts.tolist() == [0, 2, 7, 8, 8]
    assert captured.contexts.tolist() == [*contexts, 1]
    made.batch = type(captured)(**{**vars(captured), "max_context": POSITIONS})
    q = torch.randn(16, HEADS * SIZE, generator=torch.Generator().manual_seed(2))
    out = made.forward_extend(q, None, None, layer(), SimpleNamespace(), save_kv_cache=False)
    torch.testing.assert_close(out[:8], plain(made, q[:8], lanes, counts, contexts), rtol=1e-4, atol=1e-5)
    assert not out[8:].any()


@torch.inference_mode()
def test_modes_of_an_eager_pass() -> None:
    made, lanes = backend(), torch.tensor([2, 4])
    q = torch.randn(7, HEADS * SIZE, generator=torch.Generator().manual_seed(3))
    step = SimpleNamespace(
        forward_mode=ForwardMode.DECODE, batch_size=2, req_pool_indices=lanes, seq_lens=torch.tensor([12, 31]),
        spec_info=None,
    )  # fmt: skip
    made.init_forward_metadata(step)
    out = made.forward_decode(q[:2], None, None, layer(), step, save_kv_cache=False)
    torch.testing.assert_close(out, plain(made, q[:2], [2, 4], [1, 1], [11, 30]), rtol=1e-4, atol=1e-5)

    prompt = SimpleNamespace(
        forward_mode=ForwardMode.EXTEND, batch_size=2, req_pool_indices=lanes, seq_lens=torch.tensor([13, 4]),
        extend_seq_lens=torch.tensor([3, 4]), extend_seq_lens_cpu=[3, 4], extend_prefix_lens=torch.tensor([10, 0]),
        spec_info=None,
    )  # fmt: skip
    made.init_forward_metadata(prompt)
    out = made.forward_extend(q, None, None, layer(), prompt, save_kv_cache=False)
    torch.testing.assert_close(out, plain(made, q, [2, 4], [3, 4], [10, 0]), rtol=1e-4, atol=1e-5)


@torch.inference_mode()
def test_draft_blocks_see_themselves_whole_and_windows_count_the_row_itself() -> None:
    made = backend()
    block = SimpleNamespace(
        forward_mode=ForwardMode.TARGET_VERIFY, batch_size=1, req_pool_indices=torch.tensor([1]),
        seq_lens=torch.tensor([6]), input_ids=torch.zeros(WIDTH), spec_info=SimpleNamespace(),
    )  # fmt: skip
    made.init_forward_metadata(block)
    q = torch.ones(WIDTH, HEADS * SIZE)
    out = made.forward_extend(q, None, None, layer(AttentionType.ENCODER_ONLY), block, save_kv_cache=False)
    assert (out - out[0]).abs().max() < 1e-6  # equal queries over equal keys
    last = plain(made, q[:1], [1], [1], [6 + WIDTH - 1])
    torch.testing.assert_close(out[:1], last, rtol=1e-4, atol=1e-5)

    out = made.forward_extend(q, None, None, layer(window=0), block, save_kv_cache=False)
    own = made.pool.values[made.table[1, 6 : 6 + WIDTH].long()].repeat_interleave(HEADS // KV, 1).flatten(1)
    torch.testing.assert_close(out, own, rtol=1e-4, atol=1e-5)
