"""Make a tiny target and a tiny DFlash drafter that agree often, so that acceptance counts can be compared.

    python tests/oracle/make_pair.py OUT [--family qwen3|llama]        under a minute on one core, fixed seed

OUT/target is a Hugging Face folder (float32 safetensors, a tokenizer of words t0 … t255), OUT/drafter a z-lab folder.
Both learn streams of counting, repeated motifs and walks over a fixed permutation: easy to continue, not always.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from dscale.config import AnchorLayout, DecoderConfig, DrafterConfig, RopeConfig
from dscale.layers.rotary import rotary_table
from dscale.models.drafter import Drafter
from dscale.models.drafter_checkpoint import save_drafter
from dscale.train.block_attention import BlockAttention

VOCABULARY, WORDS, EOS, MASK = 256, 96, 254, 255
LENGTH, BATCH, WIDTH, TAPS, ANCHORS = 64, 12, 8, (0, 2), 6
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
DRAFTER = DrafterConfig(
    DecoderConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        max_position=512,
        qk_norm=True,
        rope=RopeConfig(theta=5000.0),
    ),
    block_size=WIDTH,
    taps=TAPS,
    mask_token_id=MASK,
    layout=AnchorLayout.MASKED,
    target_layers=4,
)
WALK = torch.randperm(WORDS, generator=torch.Generator().manual_seed(11)).tolist()


def stream(length: int, generator: torch.Generator) -> list[int]:
    """Segments of 6 … 20 tokens: counting by a step, a motif repeated, or a walk over a fixed permutation."""

    def pick(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    tokens: list[int] = []
    while len(tokens) < length:
        kind, size, first = pick(0, 3), pick(6, 21), pick(0, WORDS)
        if kind == 0:
            step = pick(1, 4)
            tokens += [(first + step * index) % WORDS for index in range(size)]
        elif kind == 1:
            motif = [pick(0, WORDS) for _ in range(pick(2, 5))]
            tokens += [motif[index % len(motif)] for index in range(size)]
        else:
            for _ in range(size):
                tokens.append(first)
                first = WALK[first]
    return tokens[:length]


def batch(generator: torch.Generator) -> Tensor:
    """Token ids [BATCH, LENGTH]."""
    return torch.tensor([stream(LENGTH, generator) for _ in range(BATCH)])


def cosine(optimizer: torch.optim.Optimizer, step: int, steps: int, peak: float) -> None:
    """Set the rate: 5% warm-up, then cosine to zero."""
    rate = peak * min(1.0, step / (0.05 * steps), 0.5 + 0.5 * float(torch.cos(torch.tensor(torch.pi * step / steps))))
    for group in optimizer.param_groups:
        group["lr"] = rate


def train_target(family: str, steps: int) -> torch.nn.Module:
    """A transformers model of the family that has learned the streams; its head is tied for Qwen3 only."""
    torch.manual_seed(0)
    common: dict[str, Any] = {
        **SIZES,
        "vocab_size": VOCABULARY,
        "num_hidden_layers": 4,
        "max_position_embeddings": 512,
        "tie_word_embeddings": family == "qwen3",
        "bos_token_id": None,
        "eos_token_id": EOS,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    if family == "llama":
        model: torch.nn.Module = LlamaForCausalLM(LlamaConfig(**common))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**common))
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    generator = torch.Generator().manual_seed(1)
    for step in range(1, steps + 1):
        cosine(optimizer, step, steps, 5e-3)
        ids = batch(generator)
        logits = model(ids, use_cache=False).logits[:, :-1]
        loss = functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 200 == 0:
            print(f"target step {step} loss {loss:.3f}", flush=True)
    return model.eval()


def block_attention(drafter: Drafter, context: Tensor, anchors: Tensor) -> BlockAttention:
    """Anchors [B, A] over context features [B, S, H]: a block sees the context before its anchor, and itself."""
    config = drafter.config.decoder
    table = rotary_table(config.rope, config.head_dim, config.max_position, context.device)
    many, length = context.shape[:2]
    rows = anchors.shape[1] * WIDTH
    position = (anchors[:, :, None] + torch.arange(WIDTH)).flatten(1)  # [B, A·W]
    owner = torch.arange(rows) // WIDTH
    seen = torch.arange(length)[None, None, :] < anchors.repeat_interleave(WIDTH, 1)[:, :, None]
    own = (owner[:, None] == owner[None, :]).expand(many, rows, rows)
    angles = table[:length].repeat(many, 1)
    mask = torch.cat([seen, own], dim=-1)
    return BlockAttention(drafter, context.flatten(0, 1), angles, table[position].flatten(0, 1), many, mask)


def train_drafter(target: torch.nn.Module, steps: int) -> Drafter:
    """A drafter that has learned the target's own choices on the streams, slots weighted exp(-(k-1)/4)."""
    torch.manual_seed(2)
    drafter = Drafter(DRAFTER)
    for parameter in drafter.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    target.requires_grad_(False)
    embedding, head = target.get_input_embeddings(), target.get_output_embeddings()  # type: ignore[operator]
    optimizer = torch.optim.AdamW(drafter.parameters(), weight_decay=0.0)
    generator = torch.Generator().manual_seed(3)
    weight = torch.exp(-torch.arange(WIDTH - 1) / 4.0)
    for step in range(1, steps + 1):
        cosine(optimizer, step, steps, 4e-3)
        ids = batch(generator)
        out = target(ids, output_hidden_states=True, use_cache=False)
        taps = torch.cat([out.hidden_states[layer + 1] for layer in TAPS], dim=-1)
        anchors = torch.randint(4, LENGTH - WIDTH, (BATCH, ANCHORS), generator=generator)
        block = torch.full((BATCH, ANCHORS, WIDTH), MASK)
        block[:, :, 0] = ids.gather(1, anchors)
        attend = block_attention(drafter, drafter.context(taps), anchors)
        hidden = drafter(embedding(block).flatten(0, 2), attend).view(BATCH, ANCHORS, WIDTH, -1)
        wanted = (anchors[:, :, None] + torch.arange(1, WIDTH)).flatten(1)
        labels = ids.gather(1, wanted).view(BATCH, ANCHORS, WIDTH - 1)
        loss = functional.cross_entropy(head(hidden[:, :, 1:]).movedim(-1, 1), labels, reduction="none")
        loss = (loss * weight).mean() / weight.mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
        if step % 200 == 0:
            print(f"drafter step {step} loss {loss:.3f}", flush=True)
    return drafter


def save_tokenizer(folder: Path, vocabulary: int = VOCABULARY) -> None:
    """Words t0, t1 … split at blanks, the last two <eos> and <mask>, so that engines that want a tokenizer find one."""
    words = [f"t{index}" for index in range(vocabulary - 2)] + ["<eos>", "<mask>"]
    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token="t0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(folder)


def make_pair(out: Path, family: str = "qwen3", steps: int = 600) -> None:
    """Train and save OUT/target and OUT/drafter."""
    target = train_target(family, steps)
    target.save_pretrained(out / "target")  # type: ignore[operator]
    save_tokenizer(out / "target")
    drafter = train_drafter(target, steps)
    save_drafter(drafter, out / "drafter", dtype=torch.float32)


def prompts(count: int, seed: int = 5) -> list[list[int]]:
    """Prompts of 5 … 40 tokens from the same streams, cut at any place."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(5, 41, (count,), generator=generator).tolist()
    return [stream(length, generator) for length in lengths]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--family", choices=["qwen3", "llama"], default="qwen3")
    parser.add_argument("--steps", type=int, default=600)
    given = parser.parse_args()
    torch.set_num_threads(1)  # matrices this small gain nothing from a second thread
    make_pair(given.out, given.family, given.steps)
