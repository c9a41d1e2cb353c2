"""The drafter over many blocks at once: rows of text, a list of anchors per row, a bidirectional block per anchor.

Training, the re-anchored walk, traces and offline evaluation all run this one pass:

    taps of the frozen target over the packed rows ─► context keys and values of every row
    [anchor, mask, …] per anchor                   ─► drafter ─► hidden of the W-1 new positions

On CUDA it is compiled and uses flex attention over lists of tiles where the sizes are multiples of a tile; elsewhere
plain attention with dense masks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dscale.config import require
from dscale.layers.rotary import rotary_table
from dscale.models.decoder import Target
from dscale.models.drafter import Drafter
from dscale.train.anchors import (
    TILE,
    Anchors,
    Tiles,
    block_inputs,
    block_labels,
    block_tiles,
    dense_block_mask,
    dense_row_mask,
    flex_block_mask,
    flex_row_mask,
    row_tiles,
)
from dscale.train.block_attention import BlockAttention, Mask, PackedAttention

ATTENTION = ("auto", "flex", "dense")


@dataclass(frozen=True)
class ForwardConfig:
    """length of a packed row in tokens; rows and anchors (blocks a row) of one pass, fixed so that it compiles once."""

    length: int
    rows: int
    anchors: int
    attention: str = "auto"  # flex, dense, or auto: flex on CUDA
    compile: bool = True  # on CUDA only

    def __post_init__(self) -> None:
        for name in ("length", "rows", "anchors"):
            require(getattr(self, name) > 0, f"train.{name}: {getattr(self, name)} must be positive")
        require(self.attention in ATTENTION, f"train.attention: {self.attention!r}; allowed are {', '.join(ATTENTION)}")


class BlockForward:
    """Runs target and drafter of one process. W is the drafter's width (anchor included), D = W-1 drafts a block."""

    def __init__(self, target: Target, drafter: Drafter, config: ForwardConfig) -> None:
        self.target, self.drafter, self.config = target, drafter, config
        self.device = target.embedding.device
        self.width = drafter.config.width
        self.queries = drafter.config.queries(self.width)
        decoder = target.config.decoder
        self.table = rotary_table(decoder.rope, decoder.head_dim, config.length + self.queries, self.device)
        own = drafter.config.decoder
        self.draft_table = rotary_table(own.rope, own.head_dim, config.length + self.queries, self.device)
        cuda = self.device.type == "cuda"
        tiled = config.length % TILE == 0 and config.anchors * self.queries % TILE == 0 and TILE % self.queries == 0
        self.flex = config.attention == "flex" or (config.attention == "auto" and cuda and tiled)
        require(
            not self.flex or tiled,
            f"train.attention: flex needs rows of {config.length} and {config.anchors}·{self.queries} to be multiples "
            f"of {TILE}, and {self.queries} a divisor of it; allowed is dense",
        )
        compiled: Callable = (lambda f: torch.compile(f, dynamic=False)) if config.compile and cuda else (lambda f: f)
        self._compiled_taps, self._compiled_hidden = compiled(self._taps), compiled(self._hidden)
        self._compiled_states = compiled(self._states)

    def taps(self, ids: Tensor, first: Tensor) -> Tensor:
        """Packed rows int32 [R, L] → taps [R·L, T·H] of the frozen target."""
        with torch.no_grad():
            return self._compiled_taps(ids, first, row_tiles(first) if self.flex else None)

    def target_states(self, ids: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
        """As taps, and the target's hidden [R·L, H] after its final norm, for distillation."""
        with torch.no_grad():
            return self._compiled_states(ids, first, row_tiles(first) if self.flex else None)

    def hidden(self, ids: Tensor, first: Tensor, anchors: Anchors, taps: Tensor) -> Tensor:
        """Hidden [R, A, D, H] after the final norm of the D new positions of every block."""
        inputs, positions = block_inputs(ids, anchors, self.queries, self.drafter.config.mask_token_id)
        tiles = block_tiles(anchors, self.config.length, self.queries) if self.flex else None
        return self._compiled_hidden(taps, inputs, positions, first, anchors, tiles)

    def __call__(self, ids: Tensor, first: Tensor, answer: Tensor, anchors: Anchors) -> tuple[Tensor, Tensor, Tensor]:
        """(hidden [R, A, D, H], label tokens [R, A, D], supervised bool [R, A, D]) of the blocks at these anchors."""
        labels = block_labels(ids, answer, first, anchors, self.width)
        return self.hidden(ids, first, anchors, self.taps(ids, first)), labels.token, labels.supervised

    def _taps(self, ids: Tensor, first: Tensor, tiles: Tiles | None) -> Tensor:
        return self._states(ids, first, tiles)[0]

    def _states(self, ids: Tensor, first: Tensor, tiles: Tiles | None) -> tuple[Tensor, Tensor]:
        at = torch.arange(self.config.length, device=ids.device)
        angles = self.table[(at - first).flatten()]
        mask = dense_row_mask(first) if tiles is None else flex_row_mask(tiles, first)
        attend = PackedAttention(self.target.config.decoder, angles, ids.shape[0], mask)
        hidden, taps = self.target(ids.flatten(), attend, self.drafter.config.taps)
        assert taps is not None
        return taps, hidden

    def _hidden(
        self, taps: Tensor, inputs: Tensor, positions: Tensor, first: Tensor, anchors: Anchors, tiles: Tiles | None
    ) -> Tensor:
        rows, count, queries = inputs.shape
        length = self.config.length
        at = torch.arange(length, device=inputs.device)
        half = inputs.device.type == "cuda" and self.target.embedding.dtype == torch.bfloat16
        with torch.autocast(inputs.device.type, torch.bfloat16, enabled=half):
            if tiles is None:
                mask: Mask = dense_block_mask(anchors, length, queries)
            else:
                mask = flex_block_mask(tiles, anchors, length, queries)
            context = self.drafter.context(taps)
            angles = self.draft_table[(at - first).flatten()], self.draft_table[positions.flatten()]
            attend = BlockAttention(self.drafter, context, *angles, rows, mask)
            hidden = self.drafter(self.target.embed(inputs.flatten()), attend)
        return hidden.view(rows, count, queries, -1)[:, :, queries - (self.width - 1) :]  # 1+N drops slot 0
