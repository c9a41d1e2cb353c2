"""Anchors and masks against naive loops."""

import torch
from torch.nn.attention.flex_attention import create_mask

from dscale.train.anchors import (
    block_inputs,
    block_labels,
    block_tiles,
    dense_block_mask,
    dense_row_mask,
    flex_block_mask,
    flex_row_mask,
    row_tiles,
    sample_anchors,
    valid_anchors,
)

from .tiny import tensors, tiny_rows

WIDTH = 16


def drawn(count=32):
    ids, first, answer = tensors(tiny_rows(3, 256))
    keys = torch.rand(ids.shape, generator=torch.Generator().manual_seed(0))
    return ids, first, answer, sample_anchors(answer, first, count, keys)


def test_sampled_anchors_are_valid_distinct_and_ascending():
    _, first, answer, anchors = drawn()
    for row in range(3):
        chosen = anchors.position[row][anchors.live[row]].tolist()
        assert len(chosen) == 32
        assert chosen == sorted(set(chosen))
        for p in chosen:
            assert answer[row, p + 1]
            assert first[row, p] == first[row, p + 1]
            assert answer[row, p] or not answer[row, :p][first[row, :p] == first[row, p]].any()


def test_more_anchors_than_valid_positions_leaves_dead_ones():
    _, first, answer, anchors = drawn(240)
    assert (anchors.live.sum(1) == valid_anchors(answer, first).sum(1)).all()


def test_labels_stop_at_the_end_of_the_answer():
    ids, first, answer, anchors = drawn()
    labels = block_labels(ids, answer, first, anchors, WIDTH)
    for row in range(3):
        for a, p in enumerate(anchors.position[row].tolist()):
            going = True
            for k in range(1, WIDTH):
                at = p + k
                going = going and at < 256 and bool(answer[row, at]) and first[row, at] == first[row, p]
                assert labels.supervised[row, a, k - 1] == going
                if going:
                    assert labels.token[row, a, k - 1] == ids[row, at]


def test_block_inputs_hold_the_anchor_then_masks_at_conversation_positions():
    ids, _, _, anchors = drawn()
    inputs, positions = block_inputs(ids, anchors, WIDTH, 7)
    p, start = int(anchors.position[1, 4]), int(anchors.first[1, 4])
    assert inputs[1, 4].tolist() == [int(ids[1, p])] + [7] * (WIDTH - 1)
    assert positions[1, 4].tolist() == list(range(p - start, p - start + WIDTH))


def test_dense_block_mask_equals_a_loop():
    _, _, _, anchors = drawn(8)
    mask = dense_block_mask(anchors, 256, WIDTH)
    for row in range(3):
        for q in range(0, 8 * WIDTH, 5):
            a = q // WIDTH
            for key in range(256):
                assert mask[row, q, key] == (anchors.first[row, a] <= key < anchors.position[row, a])
            for key in range(8 * WIDTH):
                assert mask[row, q, 256 + key] == (key // WIDTH == a)


def full(mask, rows, queries, keys):
    """What a flex mask lets through: its predicate inside the tiles it lists."""
    inside = mask.to_dense()[:, 0].bool().repeat_interleave(128, 1).repeat_interleave(128, 2)[:, :, :keys]
    return create_mask(mask.mask_mod, rows, 1, queries, keys, device="cpu")[:, 0] & inside


def test_flex_masks_equal_the_dense_ones():
    _, first, _, anchors = drawn(32)
    flex = flex_block_mask(block_tiles(anchors, 256, WIDTH), anchors, 256, WIDTH)
    assert torch.equal(full(flex, 3, 32 * WIDTH, 256 + 32 * WIDTH), dense_block_mask(anchors, 256, WIDTH))
    assert torch.equal(full(flex_row_mask(row_tiles(first), first), 3, 256, 256), dense_row_mask(first))
