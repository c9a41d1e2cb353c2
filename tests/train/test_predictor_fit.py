"""Fitting on made-up traces whose acceptance can be read off the features; blocks cut short; warm starts."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dscale.config import InputError
from dscale.speculation.predictor import Predictor, PredictorConfig, predictor_loss, survival
from dscale.train.network import Examples, Mlp, forward, merge, train_network
from dscale.train.predictor import FitConfig, columns_of, fit_network, network_of, predictor_of, split_by_prompt
from dscale.train.quality import Outcomes, quality
from tests.train.made_up_traces import made_up

QUICK = FitConfig(rate=2e-2, batch=256, epochs=12)


def holdout_quality(traces, fitted, head="survival"):
    return quality(survival(fitted.z, head), Outcomes.of(traces.select(fitted.splits["holdout"])))


@settings(max_examples=25, deadline=None)
@given(st.sets(st.integers(-(2**63), 2**63 - 1), min_size=3, max_size=60), st.integers(0, 5))
def test_split_shares_no_prompt_loses_no_record_and_leaves_no_part_empty(names, seed):
    prompt = np.random.default_rng(1).choice(np.array(sorted(names), np.int64), 400)
    prompt[: len(names)] = sorted(names)
    parts = split_by_prompt(prompt, FitConfig(seed=seed))
    assert sorted(np.concatenate(list(parts.values())).tolist()) == list(range(400))
    owners = [set(prompt[rows].tolist()) for rows in parts.values()]
    assert all(owners)
    assert not owners[0] & owners[1]
    assert not owners[0] & owners[2]
    assert not owners[1] & owners[2]


def test_a_prompt_keeps_its_part_when_rows_move_and_prompts_are_added():
    few, many = np.arange(500), np.random.default_rng(0).permutation(np.arange(2000))
    small, large = split_by_prompt(few, FitConfig()), split_by_prompt(many, FitConfig())
    for name, rows in small.items():
        assert set(few[rows].tolist()) <= set(many[large[name]].tolist())
    assert len(large["holdout"]) / 2000 == pytest.approx(0.18, abs=0.03)
    assert len(large["validation"]) / 2000 == pytest.approx(0.12, abs=0.03)


def test_two_prompts_are_too_few():
    with pytest.raises(InputError, match="2 prompts"):
        split_by_prompt(np.array([4, 4, 9]), FitConfig())


def test_columns_follow_the_groups_that_were_stored():
    assert columns_of(3, ("confidence", "context"), ("context",)).tolist() == list(range(36, 61))
    everything = ("confidence", "hidden", "logits", "context")
    assert columns_of(3, everything, ("confidence", "logits")).tolist() == [*range(36), *range(164, 228)]
    with pytest.raises(InputError, match="hidden wanted"):
        columns_of(3, ("confidence",), ("confidence", "hidden"))


@pytest.mark.parametrize("head", ["survival", "hazard"])
def test_fit_finds_what_the_features_say_and_survives_saving(tmp_path, head):
    traces = made_up()
    fitted = fit_network(traces, replace(QUICK, head=head))
    metrics = holdout_quality(traces, fitted, head)
    assert metrics["r2"] > 0.9
    assert metrics["mae"] < 0.25
    assert metrics["retention_4_of_8"] == 1.0
    config = PredictorConfig(4, "abc", ("confidence", "context"), head=head)
    predictor_of(fitted.network, config).save(tmp_path)
    again = Predictor.load(tmp_path, "abc")
    features = torch.from_numpy(traces.features[fitted.splits["holdout"]]).float()
    torch.testing.assert_close(again.survival(features), survival(fitted.z, head))


def test_what_is_unknown_of_a_cut_block_does_not_reach_the_loss():
    """D = 3. Block 0 whole, 1 accepted. Block 1 cut at 2 rows, 1 accepted: drafts 2, 3 unknown. Block 2 cut at 3 rows,
    1 accepted: draft 2 failed, of draft 3 nothing is used."""
    z = torch.tensor([[1.0, -2.0, 0.5], [0.3, 5.0, -5.0], [0.7, -0.4, 9.0]], requires_grad=True)
    accepted, slots = torch.tensor([1, 1, 1]), torch.tensor([4, 2, 3])
    loss = predictor_loss(z, accepted, slots)
    loss.backward()
    s = torch.sigmoid(z.detach().double())
    logs = [s[0, 0], 1 - s[0, 1], 1 - s[0, 2], s[1, 0], s[2, 0], 1 - s[2, 1]]
    lengths = [(s[0].sum() - 1) ** 2, (s[1, 0] - 1) ** 2, (s[2, :2].sum() - 1) ** 2]
    want = -sum(p.log() for p in logs) / 6 + 0.02 * sum(lengths) / 3
    assert loss.item() == pytest.approx(want.item(), rel=1e-5)
    assert z.grad[1, 1:].tolist() == [0, 0]
    assert z.grad[2, 2] == 0
    assert (z.grad[0] != 0).all()


def test_hazard_loss_by_hand_learns_from_reached_positions_only():
    z = torch.tensor([[1.0, -2.0, 0.5], [0.3, 5.0, -5.0]], requires_grad=True)
    loss = predictor_loss(z, torch.tensor([0, 2]), torch.tensor([4, 3]), "hazard")
    s = torch.sigmoid(z.detach().double())
    cross = -((1 - s[0, 0]).log() + s[1, 0].log() + s[1, 1].log()) / 3
    first = s[0].cumprod(0).sum() ** 2
    second = (s[1, 0] + s[1, 0] * s[1, 1] - 2) ** 2
    assert loss.item() == pytest.approx((cross + 0.02 * (first + second) / 2).item(), rel=1e-5)


@pytest.mark.parametrize("head", ["survival", "hazard"])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_fit_on_randomly_cut_blocks_approaches_the_fit_on_whole_ones(head, seed):
    """Noisy features, blocks cut at random: survival on the (whole) holdout is nearly that of the fit on whole blocks,
    while taking cut blocks at their word would be far off."""
    traces = made_up(6000, width=6, seed=seed, noise=12.0)
    slots = np.random.default_rng(seed + 100).integers(2, 7, len(traces)).astype(np.int16)
    accepted = np.minimum(traces.accepted, slots - 1).astype(np.int16)
    cut, believed = replace(traces, accepted=accepted, slots=slots), replace(traces, accepted=accepted)
    how = FitConfig(rate=1e-2, batch=512, epochs=8, hidden_units=16, head=head, seed=seed)
    whole, cut_q, believed_q = (survival(fit_network(one, how).z, head) for one in (traces, cut, believed))
    mean = (cut_q - whole).mean(0)[1:]
    wrong = (believed_q - whole).mean(0)[1:]
    assert mean.abs().max() < 0.04
    assert wrong.min() < -0.12
    assert (cut_q - whole).abs().mean() < 0.08


def test_never_varying_features_and_units_do_not_matter():
    """A feature that was constant in training has no weight, whatever it is when served."""
    fitted = fit_network(made_up(), QUICK)
    assert fitted.network.first.weight[:, 3].abs().max() == 0
    assert fitted.network.first.weight[:, 7].abs().max() > 0


def test_merged_members_give_the_mean_of_their_logits():
    torch.manual_seed(0)
    members = [Mlp(5, 3, 2) for _ in range(3)]
    x = torch.randn(7, 5)
    want = torch.stack([member(x) for member in members]).mean(0)
    torch.testing.assert_close(merge(members)(x), want)
    fitted = fit_network(made_up(600), replace(QUICK, members=2, epochs=2, hidden_units=8))
    assert fitted.network.first.out_features == 16


def test_a_warm_start_begins_where_the_old_predictor_stood():
    traces = made_up()
    first = fit_network(traces, QUICK)
    old = predictor_of(first.network, PredictorConfig(4, "abc", ("confidence", "context")))
    again = fit_network(traces, replace(QUICK, rate=1e-9, epochs=1), start=network_of(old))
    torch.testing.assert_close(again.z, first.z, rtol=1e-2, atol=2e-2)


def test_a_killed_fit_goes_on_to_the_same_bits(tmp_path, monkeypatch):
    traces = made_up(800)
    whole = fit_network(traces, QUICK, checkpoint=tmp_path / "whole")

    class Killed(Exception):
        pass

    def stop(epoch, loss):
        if epoch == 8:
            raise Killed

    with pytest.raises(Killed):
        fit_network(traces, QUICK, checkpoint=tmp_path / "cut", progress=stop)
    seen = []
    resumed = fit_network(traces, QUICK, checkpoint=tmp_path / "cut", progress=lambda epoch, loss: seen.append(epoch))
    assert seen[0] == 6  # epoch 5 was saved
    assert torch.equal(resumed.z, whole.z)
    (tmp_path / "cut.0").write_bytes(b"torn")
    assert torch.equal(fit_network(traces, QUICK, checkpoint=tmp_path / "cut").z, whole.z)


def test_the_best_epoch_is_kept():
    """Labels that the features do not carry: validation only gets worse, so the early epochs are kept."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 40)).astype(np.float32)
    y, k = rng.integers(0, 3, 300), np.full(300, 3)
    train, validation = (Examples.of(x[part], y[part], k[part], "cpu") for part in (slice(0, 150), slice(150, 300)))
    losses = {}
    how = FitConfig(rate=3e-2, batch=16, epochs=12, patience=12)
    network = train_network(train, validation, 2, how, progress=losses.__setitem__)
    final = float(validation.loss(forward(network, validation.features), "survival"))
    assert final == pytest.approx(min(losses.values()), rel=1e-3)
    stopped = {}
    train_network(train, validation, 2, replace(how, patience=2, epochs=60), progress=stopped.__setitem__)
    assert len(stopped) < 12
