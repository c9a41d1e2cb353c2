"""Models of known shapes with random weights, made on the device in a moment: for speed, never for text.

    load_target("random:qwen3-8b", torch.bfloat16, "cuda")      no tokenizer: prompts are token ids
    random_drafter_of(target.config, torch.bfloat16, "cuda")    the drafter that such a target has in practice

Scales keep activations of deep bf16 stacks near 1: weights have variance 1 / inputs, those that write to the residual
stream less by its number of writers, logits a standard deviation of HEAD_SCALE. Nothing here resembles language.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor, nn

from dscale.config import AnchorLayout, DecoderConfig, DrafterConfig, RopeConfig, TargetConfig, require
from dscale.layers.ranks import ALONE, Ranks
from dscale.models.checkpoint import piece_rows, put_parameter
from dscale.models.drafter import Drafter
from dscale.models.drafter_checkpoint import empty_drafter
from dscale.models.drafter_config import default_taps
from dscale.models.loader import LoadedTarget, empty_target
from dscale.models.shares import Share, stacked

PREFIX = "random:"
HEAD_SCALE = 2.0
BLOCK, DRAFT_LAYERS = 16, 5  # of the drafters
QWEN3_EOS = (151645, 151643)
QWEN3_ROPE = RopeConfig(theta=1e6)

SHAPES: dict[str, TargetConfig] = {
    "qwen3-8b": TargetConfig(
        "qwen3",
        DecoderConfig(151936, 4096, 12288, 36, 32, 8, 128, max_position=40960, qk_norm=True, rope=QWEN3_ROPE),
        tie_embeddings=False,
        eos_token_ids=QWEN3_EOS,
    ),
    "qwen3-4b": TargetConfig(
        "qwen3",
        DecoderConfig(151936, 2560, 9728, 36, 32, 8, 128, max_position=40960, qk_norm=True, rope=QWEN3_ROPE),
        tie_embeddings=True,
        eos_token_ids=QWEN3_EOS,
    ),
    "tiny": TargetConfig(
        "qwen3",
        DecoderConfig(512, 64, 128, 6, 4, 2, 16, max_position=2048, qk_norm=True),
        tie_embeddings=True,
        eos_token_ids=(0,),
    ),
}


def is_shape(source: str) -> bool:
    """True for names that begin with random:."""
    return source.startswith(PREFIX)


def random_shape(
    source: str, dtype: torch.dtype, device: str = "cpu", seed: int = 0, ranks: Ranks = ALONE
) -> LoadedTarget:
    """The target "random:NAME" of SHAPES, without a tokenizer; InputError for other names. Of several ranks each draws
    the weights of all and keeps its share."""
    name = source.removeprefix(PREFIX)
    known = ", ".join(PREFIX + one for one in SHAPES)
    require(name in SHAPES, f"{source}: no such shape; allowed are {known}")
    config = SHAPES[name]
    model, share, whole = empty_target(config, ranks, source)
    fill(model, config.decoder.num_layers, dtype, device, seed, share, whole)
    model.tie()
    return LoadedTarget(model.eval().requires_grad_(False), config, None, source)


def drafter_shape(target: TargetConfig) -> DrafterConfig:
    """A drafter as released for targets of this size: its widths and heads, five layers (fewer for a shallow target),
    blocks of 16."""
    decoder = target.decoder
    layers = max(min(DRAFT_LAYERS, decoder.num_layers - 3), 1)
    body = replace(
        decoder, num_layers=layers, qk_norm=True, qkv_bias=False, output_bias=False, mlp_bias=False, windows=()
    )  # fmt: skip
    return DrafterConfig(
        decoder=body,
        block_size=BLOCK,
        taps=default_taps(decoder.num_layers, layers),
        mask_token_id=min(151669, decoder.vocab_size - 1),
        layout=AnchorLayout.MASKED,
        target_layers=decoder.num_layers,
    )


def random_drafter_of(
    target: TargetConfig, dtype: torch.dtype, device: str = "cpu", seed: int = 1, ranks: Ranks = ALONE
) -> Drafter:
    """A drafter of `drafter_shape` with random weights, prepared; target: the whole one's config."""
    config = drafter_shape(target)
    drafter, share, whole = empty_drafter(config, ranks)
    fill(drafter, config.decoder.num_layers, dtype, device, seed, share, whole)
    drafter.eval().requires_grad_(False)
    drafter.prepare()
    return drafter


def fill(
    model: nn.Module,
    layers: int,
    dtype: torch.dtype,
    device: str,
    seed: int,
    share: Share | None = None,
    whole: nn.Module | None = None,
) -> None:
    """Replace a model's parameters on the meta device by random ones, drawn on the device one after the other.

    share: what of the undivided model on the meta device, `whole`, is kept of each as soon as it is drawn.
    """
    generator = torch.Generator(device).manual_seed(seed)
    for name, parameter in list((whole or model).named_parameters()):
        value = torch.empty(parameter.shape, dtype=dtype, device=device)
        if parameter.dim() == 1:
            value.fill_(1.0 if "norm" in name else 0.0)
        else:
            value.normal_(0.0, _scale(name, parameter.shape[-1], layers), generator=generator)
        if share is not None and share.ranks.size > 1:
            value = _kept(name, value, share, dtype, device)
        put_parameter(model, name, value)


def _kept(name: str, value: Tensor, share: Share, dtype: torch.dtype, device: str) -> Tensor:
    """This rank's slice of a stacked parameter, in memory of its own."""
    parts = ("q", "k", "v") if ".qkv." in name else ("gate", "up") if ".gate_up." in name else ("all",)
    rows = piece_rows(name, parts, value.shape[0], share.whole)
    return stacked(share.cut(name, value.split(rows)), dtype, device).clone()


def _scale(name: str, inputs: int, layers: int) -> float:
    if name in ("embedding", "head.weight"):
        return HEAD_SCALE / math.sqrt(inputs)
    writes = name.endswith(("output.weight", "down.weight"))
    return 1.0 / math.sqrt(inputs * (2 * layers if writes else 1))
