"""The trainer against a per-anchor brute force, its batches, and its checkpoints."""

import io
from dataclasses import replace

import pytest
import torch

from dscale.config import AnchorLayout, InputError
from dscale.layers.attention import DenseAttention
from dscale.layers.rotary import rotary_table
from dscale.train.anchors import sample_anchors
from dscale.train.block_attention import BlockAttention
from dscale.train.drafter import DrafterTrainer, predicting
from dscale.train.loss import slot_weights
from dscale.train.recipe import TrainConfig, mixed, recipe
from dscale.train.world import World

from .tiny import tensors, tiny_drafter, tiny_rows, tiny_target

LAYOUTS = [AnchorLayout.MASKED, AnchorLayout.ANCHOR_FIRST]


def trainer(layout=AnchorLayout.MASKED, **settings):
    target = tiny_target()
    drafter = tiny_drafter(target)
    drafter.config = replace(drafter.config, layout=layout)
    values = {
        "rows": 2,
        "anchors": 8,
        "steps": 8,
        "chunks": 3,
        "warmup": 0.0,
        "log_every": 4,
        "sync_every": 1,
    } | settings
    return DrafterTrainer(target, drafter, tiny_rows(), TrainConfig(**values), World())


def hidden_of_one_anchor(run, ids, first, row, p):
    """One conversation alone, its context cut before the anchor, one block of 4 queries: no packing, no mask."""
    start = int(first[row, p])
    alone = ids[row, start : p + 1].long()
    decoder = run.target.config.decoder
    table = rotary_table(decoder.rope, decoder.head_dim, 300, torch.device("cpu"))
    taps = run.target(alone, DenseAttention(decoder, table, 1, len(alone)), run.drafter.config.taps)[1]
    context = run.drafter.context(taps[:-1])
    block = torch.tensor([int(ids[row, p])] + [run.drafter.config.mask_token_id] * 3)
    queries, seen = 4, len(alone) - 1
    mask = torch.ones(1, queries, seen + queries, dtype=torch.bool)
    attend = BlockAttention(run.drafter, context, table[:seen], table[seen : seen + queries], 1, mask)
    hidden = run.drafter(run.target.embed(block), attend)
    return hidden if run.drafter.config.layout is AnchorLayout.ANCHOR_FIRST else hidden[1:]


@pytest.mark.parametrize(
    ("attention", "layout"), [("dense", LAYOUTS[0]), ("dense", LAYOUTS[1]), ("flex", LAYOUTS[0]), ("flex", LAYOUTS[1])]
)
def test_packed_forward_equals_each_anchor_alone(attention, layout):
    run = trainer(layout, attention=attention, anchors=32)
    ids, first, answer = (part[:2] for part in tensors(tiny_rows()))
    keys = torch.rand(ids.shape, generator=torch.Generator().manual_seed(2))
    anchors = sample_anchors(answer, first, 32, keys)
    with torch.no_grad():
        hidden, token, _ = run.forward(ids, first, answer, anchors)
        assert hidden.shape[2] == (4 if layout is AnchorLayout.ANCHOR_FIRST else 3)
        for row in range(2):
            for a in range(0, 32, 5):
                p = int(anchors.position[row, a])
                alone = hidden_of_one_anchor(run, ids, first, row, p)
                assert torch.allclose(hidden[row, a], alone, atol=1e-4)
                assert int(token[row, a, 0]) == int(ids[row, p + 1])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("share", [0.0, 0.9])
def test_loss_equals_brute_force_over_anchors(layout, share):
    run = trainer(layout, distil=share, gamma=7.0)
    (batch,) = run.batches()
    loss, _, supervised = run.loss(batch, run.weights([batch]))
    ids, first, answer, drafts = batch.ids, batch.first, batch.answer, run.forward.width - 1
    total, weights = 0.0, 0.0
    for row in range(2):
        for p in batch.anchors.position[row].tolist():
            logits = run.target.logits(hidden_of_one_anchor(run, ids, first, row, p)).log_softmax(-1)
            for k in range(1, drafts + 1):
                if p + k >= 128 or not answer[row, p + k] or first[row, p + k] != first[row, p]:
                    break
                weight = float(slot_weights(torch.ones(drafts, dtype=torch.bool), 7.0)[k - 1])
                apart = float((logits[k - 1].exp() - truth(run, ids[row, int(first[row, p]) : p + k])).abs().sum())
                total += weight * ((share - 1) * float(logits[k - 1, ids[row, p + k]]) + share * apart)
                weights += weight
    assert float(loss) == pytest.approx(total / weights, abs=1e-4)
    assert int(supervised[0]) == 16


def truth(run, alone):
    """The target's probabilities of the token after this text."""
    decoder = run.target.config.decoder
    table = rotary_table(decoder.rope, decoder.head_dim, 300, torch.device("cpu"))
    hidden = run.target(alone.long(), DenseAttention(decoder, table, 1, len(alone)))[0]
    return run.target.logits(hidden[-1:])[0].softmax(-1)


def test_states_that_predict_a_slot_are_those_one_before_its_token():
    run = trainer(distil=0.5)
    (batch,) = run.batches()
    rows, length = batch.ids.shape
    last = torch.arange(rows * length, dtype=torch.float32)[:, None]
    p = int(batch.anchors.position[1, 3])
    found = predicting(last, batch, 4).view(rows, 8, 3)[1, 3].tolist()
    assert found == [length + min(p + k - 1, length - 1) for k in (1, 2, 3)]


def test_two_passes_of_half_a_batch_equal_one_whole():
    whole, halves = trainer(rows=4), trainer(rows=2, accumulate=2)
    (one,), (a, b) = whole.batches(), halves.batches()
    assert torch.equal(one.anchors.position, torch.cat([a.anchors.position, b.anchors.position]))
    assert torch.equal(one.ids, torch.cat([a.ids, b.ids]))
    for _ in range(2):
        assert float(whole.step()) == pytest.approx(float(halves.step()), abs=1e-5)
    for ours, theirs in zip(whole.parameters, halves.parameters, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-4)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_training_lowers_the_loss(optimizer):
    run = trainer(optimizer=optimizer, steps=40, rate=1e-2, log_every=10)
    run.run()
    assert run.history[-1]["loss"] < 0.8 * run.history[0]["loss"]


def test_distillation_alone_brings_the_drafter_nearer_to_the_target():
    run = trainer(distil=1.0, steps=40, rate=1e-2, log_every=10)
    run.run()
    assert run.history[-1]["loss"] < 0.95 * run.history[0]["loss"]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_resumed_run_ends_in_the_same_bits(optimizer):
    whole = trainer(optimizer=optimizer)
    whole.run()
    half = trainer(optimizer=optimizer)
    while half.step_index < 3:  # in the middle of a tally
        half.step()
    saved = io.BytesIO()
    torch.save(half.state(), saved)
    rest = trainer(optimizer=optimizer)
    rest.load_state(torch.load(io.BytesIO(saved.getvalue()), weights_only=True))
    assert rest.step_index == 3
    rest.run()
    assert rest.history == whole.history
    for ours, theirs in zip(rest.drafter.parameters(), whole.drafter.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_the_best_weights_are_kept_with_the_state():
    run = trainer(steps=6, evaluate_every=2)
    told = iter([1.5, 2.5, 2.0])
    seen = []

    def evaluate():
        seen.append({name: value.clone() for name, value in run.drafter.state_dict().items()})
        return next(told)

    run.run(evaluate)
    assert [r["validation_progress"] for r in run.history if "validation_progress" in r] == [1.5, 2.5, 2.0]
    assert run.best_progress == 2.5
    for name, value in seen[1].items():
        assert torch.equal(run.best[name], value.bfloat16())


def test_a_run_in_seconds_ends_by_the_clock():
    run = trainer(steps=None, seconds=0.5)
    run.run()
    assert run.progress >= 1.0
    assert run.rate() == 0.0


def test_schedules():
    cosine, wsd = trainer(steps=100, warmup=0.04), trainer(steps=100, warmup=0.04, schedule="wsd")
    for run, expected in (
        (cosine, {0: 0.25, 50: 0.5, 100: 0.0}),
        (wsd, {0: 0.25, 50: 1.0, 80: 1.0, 90: 0.5, 100: 0.0}),
    ):
        for step, share in expected.items():
            run.step_index = step
            assert run.rate() == pytest.approx(share * 3e-3, rel=1e-3)


def test_epochs_count_steps_of_the_corpus():
    assert trainer(steps=None, epochs=2.0).total == 6  # 6 rows, 2 a step
    with pytest.raises(
        InputError, match=r"train\.rows: 4 rows · 2 passes · 1 processes a step, but .* 6 training rows"
    ):
        trainer(rows=4, accumulate=2)


def test_flex_is_refused_where_tiles_do_not_fit():
    with pytest.raises(InputError, match=r"train\.attention: flex"):
        trainer(attention="flex", anchors=9)


def test_config_refuses_what_cannot_be():
    with pytest.raises(
        InputError, match=r"train\.steps, train\.epochs, train\.seconds: give exactly one of them, not 2"
    ):
        TrainConfig(steps=3, seconds=3.0)
    with pytest.raises(InputError, match=r"train\.distil: 1\.5 must lie in \[0, 1\]"):
        TrainConfig(steps=3, distil=1.5)
    with pytest.raises(InputError, match=r"train\.schedule: 'linear'; allowed are cosine, wsd"):
        TrainConfig(steps=3, schedule="linear")


def test_presets_give_way_to_flags():
    assert recipe("full").gamma == 5.0
    timed = recipe("full", seconds=60.0, width=8)
    assert (timed.epochs, timed.seconds, timed.gamma) == (None, 60.0, None)
    assert (recipe("tiny").width, recipe("tiny", init="runs/old").width) == (8, None)
    assert [timed.decay(width) for width in (16, 10, 8, 7)] == [7.0, 5.0, 4.0, 4.0]


def test_seeds_are_fixed_numbers():
    assert mixed(0, 1, 2) == 2454264939259470908
    assert len({mixed(a, b) for a in range(9) for b in range(9)}) == 81
