"""Tiny random pairs and engines for tests: real networks, seconds to run."""

from __future__ import annotations

from typing import Any

import torch

from dscale.config import AnchorLayout, DecoderConfig, DrafterConfig, RopeConfig, TargetConfig
from dscale.engine.llm import LLM
from dscale.models.drafter import Drafter
from dscale.models.loader import LoadedTarget, random_target

FAMILY_FLAGS: dict[str, dict[str, Any]] = {
    "llama": {"rope": RopeConfig(theta=500000.0)},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True, "windows": (None, 24, None)},
}


def tiny_target(family: str, vocab: int = 5, seed: int = 0) -> LoadedTarget:
    """A random target without tokenizer. Few tokens make random drafts agree now and then."""
    decoder = DecoderConfig(
        vocab, 48, 96, 3, 4, 2, 16, max_position=512, norm_eps=1e-5, **FAMILY_FLAGS[family]
    )  # fmt: skip
    config = TargetConfig(family, decoder, tie_embeddings=family == "llama")
    model = random_target(config, seed)
    return LoadedTarget(model, config, None, f"tiny {family}")  # type: ignore[arg-type]


def tiny_drafter(target: LoadedTarget, layout: AnchorLayout = AnchorLayout.MASKED, block: int = 8) -> Drafter:
    """A random drafter that fits the target."""
    vocab = target.config.decoder.vocab_size
    decoder = DecoderConfig(vocab, 48, 64, 2, 4, 2, 16, max_position=512, qk_norm=True, windows=(None, 16))
    drafter = Drafter(DrafterConfig(decoder, block, (0, 1), mask_token_id=1, layout=layout))
    generator = torch.Generator().manual_seed(7)
    for name, parameter in drafter.named_parameters():
        if "norm" not in name:
            parameter.data.normal_(std=0.2, generator=generator)
    return drafter.eval().requires_grad_(False)


def make_llm(target: LoadedTarget, policy: str, drafter: Drafter | None = None, **options: Any) -> LLM:
    """A float32 engine with a small cache."""
    options = {"dtype": "float32", "device": "cpu", "num_pages": 64, "max_requests": 4, **options}
    return LLM(target, drafter=drafter if policy != "off" else None, predictor=None, policy=policy, **options)
