"""What a drafter starts from: random weights, layers of its target, or the weights of an earlier drafter."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from dscale.config import AnchorLayout, DecoderConfig, DrafterConfig, RopeConfig, require
from dscale.models.decoder import DecoderLayer, Target
from dscale.models.drafter import Drafter
from dscale.models.drafter_checkpoint import load_drafter
from dscale.models.drafter_config import check_fits, default_taps
from dscale.train.recipe import TrainConfig, starts_new

WIDTH, LAYERS, MASK_TOKEN = 16, 5, 16  # of a new drafter


def new_config(
    target: Target, width: int = WIDTH, layers: int = LAYERS, layout: str = "1+N", mask_token: int = MASK_TOKEN
) -> DrafterConfig:
    """A drafter with layers like the target's, evenly spread taps (dflash.md) and norms on queries and keys."""
    own = target.config.decoder
    decoder = DecoderConfig(
        own.vocab_size, own.hidden_size, own.intermediate_size, layers, own.num_heads, own.num_kv_heads, own.head_dim,
        norm_eps=own.norm_eps, max_position=own.max_position, qk_norm=True, rope=RopeConfig(own.rope.theta),
    )  # fmt: skip
    taps = tuple(sorted({max(0, tap) for tap in default_taps(own.num_layers, layers)}))
    chosen = AnchorLayout(layout)
    block = width - 1 if chosen is AnchorLayout.ANCHOR_FIRST else width
    made = DrafterConfig(decoder, block, taps, mask_token, chosen, target_layers=own.num_layers)
    check_fits(made, target.config, "train")
    return made


def initial_drafter(target: Target, config: TrainConfig, device: torch.device) -> Drafter:
    """The drafter that training starts with, float32 on the device. InputError for an init that does not fit."""
    kind, _, listed = config.init.partition(":")
    if not starts_new(config.init):
        return continued(target, config, device)
    fields = ("width", "layers", "layout", "mask_token")
    given = {name: getattr(config, name) for name in fields if getattr(config, name) is not None}
    drafter = Drafter(new_config(target, **given))
    initialise(drafter, target, config.seed)
    if kind == "target":
        from_target(drafter, target, target_layers(listed, target, drafter))
    return drafter.to(device)


def initialise(drafter: Drafter, target: Target, seed: int) -> None:
    """Seeded normal weights of deviation 0.02, smaller where a layer adds to the residual; final norm as target's."""
    generator = torch.Generator().manual_seed(seed)
    shrink = (2 * drafter.config.decoder.num_layers) ** -0.5
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if parameter.dim() == 2:
                scale = 0.02 * (shrink if ("output" in name or "down" in name) else 1.0)
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
            else:
                parameter.fill_(1.0)
        drafter.stack.norm.weight.copy_(target.stack.norm.weight)


def target_layers(listed: str, target: Target, drafter: Drafter) -> list[int]:
    """Which target layers fill the draft layers: "25-29", "3,9,15,21,27", or nothing for the last ones."""
    depth, wanted = target.config.decoder.num_layers, drafter.config.decoder.num_layers
    if not listed:
        require(wanted <= depth, f"train.init: {wanted} draft layers, but the target has only {depth}")
        return list(range(depth - wanted, depth))
    try:
        ends = [int(part) for part in listed.split("-" if "-" in listed else ",")]
    except ValueError:
        ends = []
    chosen = list(range(ends[0], ends[-1] + 1)) if "-" in listed and len(ends) == 2 else ends
    fits = len(chosen) == wanted and all(0 <= layer < depth for layer in chosen)
    require(fits, f"train.init: target:{listed}; give {wanted} layers out of 0 to {depth - 1}, as 2-6 or 1,3,5,7,9")
    return chosen


@torch.no_grad()
def from_target(drafter: Drafter, target: Target, layers: list[int]) -> None:
    """Draft layer i becomes target layer layers[i], and fc passes the last tap through.

    The target's input norm weights are folded into qkv, so that context rows (which skip that norm) and block rows go
    through the same map and all norms before qkv start at 1. Where the target has no norm on queries and keys, the
    drafter's get the size that they would have had, so that the attention stays about as sharp. Biases are left out.
    """
    size = drafter.config.decoder.hidden_size
    drafter.fc.weight.zero_()
    drafter.fc.weight[:, -size:] = torch.eye(size)
    for ours, index in zip(drafter.stack.blocks, layers, strict=True):
        theirs = target.stack.blocks[index]
        ours.qkv.weight.copy_(theirs.qkv.weight.float() * theirs.input_norm.weight.float())
        ours.post_norm.weight.copy_(theirs.post_norm.weight)
        for name in ("output", "gate_up", "down"):
            getattr(ours, name).weight.copy_(getattr(theirs, name).weight)
        for name, rows in zip(("q_norm", "k_norm"), _query_and_key_rows(ours, drafter.config), strict=True):
            norm, own = getattr(ours, name), getattr(theirs, name)
            if own is not None:
                norm.weight.copy_(own.weight)
            else:
                norm.weight.fill_(float(rows.square().sum(1).mean().sqrt()))


def _query_and_key_rows(layer: DecoderLayer, config: DrafterConfig) -> tuple[Tensor, Tensor]:
    """Rows of qkv that make queries and keys; the root of their mean squared norm is the size for inputs of size 1."""
    decoder = config.decoder
    queries, keys = decoder.num_heads * decoder.head_dim, decoder.num_kv_heads * decoder.head_dim
    return layer.qkv.weight[:queries], layer.qkv.weight[queries : queries + keys]


def continued(target: Target, config: TrainConfig, device: torch.device) -> Drafter:
    """An earlier drafter's weights with a fresh optimizer; its block may be made narrower or wider by config.width."""
    drafter = load_drafter(config.init, target, torch.float32, str(device))
    own = drafter.config
    held = {"layers": own.decoder.num_layers, "layout": own.layout.value, "mask_token": own.mask_token_id}
    for name, value in held.items():
        asked = getattr(config, name)
        require(asked in (None, value), f"train.{name}: {asked}, but the drafter {config.init} has {value}")
    if config.width is not None:
        block = own.queries(config.width)
        require(block >= 2, f"train.width: {config.width} is too narrow for the layout {own.layout.value}")
        drafter.config = replace(own, block_size=block)
    drafter.context_projection = None  # serving's copy of weights that now change
    return drafter.requires_grad_(True).train()
