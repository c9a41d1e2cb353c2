"""The trainer against a per-anchor brute force, and its checkpoints."""

import pytest
import torch

from dscale.config import InputError
from dscale.layers.attention import DenseAttention
from dscale.layers.rotary import rotary_table
from dscale.train.anchors import sample_anchors
from dscale.train.block_attention import BlockAttention
from dscale.train.drafter import DrafterTrainer, TrainConfig, World, drafter_config
from dscale.train.loss import slot_weights

from .tiny import tensors, tiny_drafter, tiny_rows, tiny_target


def trainer(**settings):
    target = tiny_target()
    values = {"rows": 2, "anchors": 8, "steps": 8, "chunks": 3, "warmup": 1, "log_every": 4, "sync_every": 1} | settings
    return DrafterTrainer(target, tiny_drafter(target), tiny_rows(), TrainConfig(**values), World())


def hidden_of_one_anchor(run, ids, first, row, p):
    """One conversation alone, its context cut before the anchor, one block: no packing, no mask."""
    start = int(first[row, p])
    alone = ids[row, start : p + 1].long()
    decoder = run.target.config.decoder
    table = rotary_table(decoder.rope, decoder.head_dim, 300, torch.device("cpu"))
    taps = run.target(alone, DenseAttention(decoder, table, 1, len(alone)), run.drafter.config.taps)[1]
    context = run.drafter.context(taps[:-1])
    block = torch.tensor([int(ids[row, p])] + [run.drafter.config.mask_token_id] * 3)
    width, seen = 4, len(alone) - 1
    mask = torch.ones(1, width, seen + width, dtype=torch.bool)
    attend = BlockAttention(run.drafter, context, table[:seen], table[seen : seen + width], 1, mask)
    return run.drafter(run.target.embed(block), attend)[1:]


@pytest.mark.parametrize("attention", ["dense", "flex"])
def test_packed_forward_equals_each_anchor_alone(attention):
    run = trainer(attention=attention, anchors=32)
    ids, first, answer = (part[:2] for part in tensors(tiny_rows()))
    keys = torch.rand(ids.shape, generator=torch.Generator().manual_seed(2))
    anchors = sample_anchors(answer, first, 32, keys)
    with torch.no_grad():
        hidden, _, _ = run.forward(ids, first, answer, anchors)
        for row in range(2):
            for a in range(0, 32, 5):
                alone = hidden_of_one_anchor(run, ids, first, row, int(anchors.position[row, a]))
                assert torch.allclose(hidden[row, a], alone, atol=1e-4)


def test_loss_equals_brute_force_over_anchors():
    run = trainer()
    loss, _, supervised = run.loss()
    ids, first, answer = run.batch()
    run.random.manual_seed(hash((0, 0, 0, 2)) % (1 << 62))
    anchors = sample_anchors(answer, first, 8, torch.rand(ids.shape, generator=run.random))
    total, weights = 0.0, 0.0
    for row in range(2):
        for p in anchors.position[row].tolist():
            logits = run.target.logits(hidden_of_one_anchor(run, ids, first, row, p)).log_softmax(-1)
            for k in range(1, 4):
                if p + k >= 128 or not answer[row, p + k] or first[row, p + k] != first[row, p]:
                    break
                weight = float(slot_weights(torch.ones(3, dtype=torch.bool), 7.0)[k - 1])
                total -= weight * float(logits[k - 1, ids[row, p + k]])
                weights += weight
    assert float(loss) == pytest.approx(total / weights, abs=1e-4)
    assert int(supervised[0]) == 16


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_training_lowers_the_loss(optimizer):
    run = trainer(optimizer=optimizer, steps=40, rate=1e-2, log_every=10)
    assert run.run()
    assert run.history[-1]["loss"] < 0.8 * run.history[0]["loss"]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_resumed_run_ends_in_the_same_weights(optimizer, tmp_path):
    whole = trainer(optimizer=optimizer)
    whole.run()
    half = trainer(optimizer=optimizer)
    while half.step_index < 4:
        half.update(half.loss()[0])
    half.save(tmp_path / "state.pt")
    rest = trainer(optimizer=optimizer)
    rest.load(tmp_path / "state.pt")
    assert rest.step_index == 4
    rest.run()
    for ours, theirs in zip(rest.drafter.parameters(), whole.drafter.parameters(), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)


def test_a_run_in_seconds_ends_by_the_clock():
    run = trainer(steps=None, seconds=0.5)
    assert run.run()
    assert run.progress >= 1.0
    assert run.rate() == 0.0


def test_default_drafter_config_follows_the_tap_rule():
    config = drafter_config(tiny_target(), layers=2)
    assert config.taps == (1, 2)
    assert config.decoder.qk_norm


def test_config_refuses_two_budgets():
    with pytest.raises(InputError, match=r"train\.steps, train\.seconds"):
        TrainConfig(steps=3, seconds=3.0)
