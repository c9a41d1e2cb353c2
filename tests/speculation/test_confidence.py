import torch
from torch import Tensor

from dscale.kernels.top_logits import TopLogits
from dscale.speculation.confidence import ConfidenceModel

W = 8


def blocks(count: int, generator: torch.Generator, centre: float = 20.0) -> TopLogits:
    """Random draft blocks: log-probabilities that fall along the block, logits around `centre` that follow them."""
    log_p = -torch.rand(count, W - 1, generator=generator) * torch.linspace(0.5, 4.0, W - 1)
    logit = centre + 1.5 * log_p + torch.randn(count, W - 1, generator=generator)
    values = torch.zeros(count, W - 1, 16)
    values[..., 0] = logit
    return TopLogits(values, torch.zeros_like(values).long(), logit - log_p, torch.zeros_like(log_p))


def true_chance(top: TopLogits) -> Tensor:
    bias = torch.linspace(1.0, -0.5, W - 1)
    p = top.log_probability.exp()
    return torch.sigmoid(bias + 0.7 * (p / (1 - p)).log() + 0.2 * (top.values[..., 0] - 20.0))


def walk(chance: Tensor, slots: Tensor, generator: torch.Generator) -> Tensor:
    """Accepted drafts [N] when draft j passes with chance [N, W-1] and `slots` rows are verified."""
    passed = torch.rand(chance.shape, generator=generator) < chance
    return torch.minimum(passed.long().cumprod(-1).sum(-1), slots - 1)


def expected_length_error(model: ConfidenceModel, top: TopLogits) -> float:
    truth = true_chance(top).cumprod(-1).sum(-1)
    return (model.survival(top)[:, 1:].sum(-1) - truth).abs().mean().item()


def test_day_one_believes_the_drafter() -> None:
    top = blocks(20, torch.Generator().manual_seed(6))
    p = top.log_probability.exp()
    torch.testing.assert_close(ConfidenceModel.day_one(W).survival(top)[:, 1:], p.cumprod(-1), rtol=2e-3, atol=1e-3)


def test_day_one_is_a_sane_survival() -> None:
    top = blocks(50, torch.Generator().manual_seed(0))
    q = ConfidenceModel.day_one(W).survival(top)
    assert q.shape == (50, W)
    assert q.dtype == torch.float32
    assert torch.equal(q[:, 0], torch.ones(50))
    assert bool((q.diff(dim=-1) <= 0).all())
    assert bool((q > 0).all())
    surer = TopLogits(top.values, top.ids, top.log_sum_exp - 0.3, top.entropy)
    assert bool((ConfidenceModel.day_one(W).survival(surer)[:, 1:] > q[:, 1:]).all())


def test_learns_from_short_verifications_without_bias() -> None:
    generator = torch.Generator().manual_seed(1)
    model, held_out = ConfidenceModel.day_one(W), blocks(400, generator)
    before = expected_length_error(model, held_out)
    for _ in range(600):
        top = blocks(8, generator)
        slots = torch.randint(1, W + 1, (8,), generator=generator)
        model.observe(top, walk(true_chance(top), slots, generator), slots)
    after = expected_length_error(model, held_out)
    assert after < 0.25 * before
    q = model.survival(held_out)
    error = q[:, 1:] / q[:, :-1] - true_chance(held_out)
    assert error[:, :3].abs().mean() < 0.03  # later drafts are seldom reached


def test_one_request_at_a_time_learns_too() -> None:
    generator = torch.Generator().manual_seed(2)
    model, held_out = ConfidenceModel.day_one(W), blocks(400, generator, centre=35.0)
    for _ in range(1500):
        top = blocks(1, generator, centre=35.0)
        model.observe(top, walk(true_chance(top), torch.tensor([W]), generator), torch.tensor([W]))
    assert bool(torch.isfinite(model.weight).all())
    assert expected_length_error(model, held_out) < 0.3


def test_a_constant_stream_does_not_run_away() -> None:
    generator = torch.Generator().manual_seed(3)
    model, top = ConfidenceModel.day_one(W), blocks(4, generator)
    for _ in range(3000):
        model.observe(top, torch.full((4,), W - 1), torch.full((4,), W))
    assert bool(torch.isfinite(model.weight).all())
    assert bool((model.survival(top)[:, -1] > 0.95).all())
    for _ in range(300):
        model.observe(top, torch.zeros(4, dtype=torch.int64), torch.full((4,), W))
    assert bool((model.survival(top)[:, 1] < 0.3).all())


def test_rows_that_were_not_reached_teach_nothing() -> None:
    top = blocks(1, torch.Generator().manual_seed(4))
    model = ConfidenceModel.day_one(W)
    model.observe(top, torch.tensor([0]), torch.tensor([1]))  # the anchor alone was verified
    assert torch.equal(model.weight, ConfidenceModel.day_one(W).weight)
    model.observe(top, torch.tensor([1]), torch.tensor([3]))  # draft 1 passed, draft 2 did not, the rest is unknown
    day_one = ConfidenceModel.day_one(W).weight
    assert model.weight[0] > day_one[0]
    assert model.weight[1] < day_one[1]
    torch.testing.assert_close(model.weight[2 : W - 1], day_one[2 : W - 1], atol=1e-5, rtol=0)


def test_parameters_keep_their_address() -> None:
    model = ConfidenceModel.day_one(W)
    address = model.weight.data_ptr()
    with torch.inference_mode():  # as a decode step runs
        top = blocks(2, torch.Generator().manual_seed(5))
        model.survival(top)
    model.observe(top, torch.tensor([2, 0]), torch.tensor([W, W]))
    assert model.weight.data_ptr() == address


def test_a_fit_to_records_is_that_of_many_steps() -> None:
    generator = torch.Generator().manual_seed(4)
    top = blocks(6000, generator)
    slots = torch.randint(1, W + 1, (6000,), generator=generator)
    accepted = walk(true_chance(top), slots, generator)
    held_out = blocks(400, generator)
    fitted = ConfidenceModel.fitted(W, top, accepted, slots)
    assert expected_length_error(fitted, held_out) < 0.06 < expected_length_error(ConfidenceModel.day_one(W), held_out)
    half = torch.arange(6000) % 2 == 0
    assert not torch.equal(
        ConfidenceModel.fitted(W, top.select(half), accepted[half], slots[half]).weight, fitted.weight
    )
    nothing = ConfidenceModel.fitted(W, top, torch.zeros_like(accepted), torch.ones_like(slots))
    assert torch.allclose(nothing.weight, ConfidenceModel.day_one(W).weight)  # one row verified shows nothing
