"""A tiny target, drafter and packed corpus for the tests of training."""

import numpy as np
import torch

from dscale.config import AnchorLayout, DecoderConfig, DrafterConfig, TargetConfig
from dscale.models.decoder import Target
from dscale.models.drafter import Drafter
from dscale.models.loader import random_target
from dscale.train.initial import initialise
from dscale.train.rows import PackedRows

VOCAB = 61


def target_config(layers: int = 5) -> TargetConfig:
    decoder = DecoderConfig(VOCAB, 24, 32, layers, 4, 2, 8, norm_eps=1e-5, max_position=512)
    return TargetConfig("llama", decoder, tie_embeddings=True, eos_token_ids=(2,))


def tiny_target() -> Target:
    return random_target(target_config(), seed=3)


def tiny_drafter(target: Target, block: int = 4) -> Drafter:
    own = target.config.decoder
    decoder = DecoderConfig(own.vocab_size, 24, 32, 2, 4, 2, 8, norm_eps=1e-5, max_position=512, qk_norm=True)
    drafter = Drafter(DrafterConfig(decoder, block, (1, 3), 5, AnchorLayout.MASKED, target_layers=own.num_layers))
    initialise(drafter, target, seed=1)
    return drafter


def tiny_rows(count: int = 6, length: int = 128, seed: int = 0) -> PackedRows:
    """Rows of conversations 12 … 40 tokens long: a prompt of 5 and an answer that counts upwards, with padding at "
    "the end."""
    rng = np.random.default_rng(seed)
    ids = np.zeros((count, length), np.int32)
    first = np.tile(np.arange(length, dtype=np.int32), (count, 1))
    answer = np.zeros((count, length), bool)
    for row in range(count):
        at = 0
        while at + 40 <= length:
            end = int(rng.integers(12, 40))
            ids[row, at : at + end] = (np.arange(end) * rng.integers(1, 4) + rng.integers(6, 50)) % VOCAB
            first[row, at : at + end] = at
            answer[row, at + 5 : at + end] = True
            at += end
    return PackedRows.plain(ids, first, answer)


def tensors(rows: PackedRows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.from_numpy(rows.ids), torch.from_numpy(rows.first), torch.from_numpy(rows.answer)
