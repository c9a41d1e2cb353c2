import math

import pytest
import torch
from scipy import stats

from dscale.speculation.noise import gumbel_noise, random_bits

MASK = (1 << 63) - 1


def mix_by_hand(x: int) -> int:
    x &= MASK
    x = ((x ^ (x >> 30)) * 0x3F58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x14D049BB133111EB) & MASK
    return x ^ (x >> 31)


def bits_by_hand(seed: int, position: int, token: int) -> int:
    golden = 0x1E3779B97F4A7C15
    return mix_by_hand(mix_by_hand(mix_by_hand(seed) + position * golden) + token * golden)


@pytest.mark.parametrize("seed", [0, 1, -1, 2**62 + 12345, -(2**63), 2**63 - 1])
def test_bits_match_python_integers(seed: int) -> None:
    for position in (0, 1, 40_000):
        bits = random_bits(torch.tensor([seed]), torch.tensor([position]), torch.tensor([0, 1, 7, 151_935]))
        assert bits.tolist() == [[bits_by_hand(seed, position, token) for token in (0, 1, 7, 151_935)]]


def test_golden_values() -> None:
    """Seeded texts depend on these numbers."""
    bits = random_bits(torch.tensor([42]), torch.tensor([7]), torch.tensor([0, 1, 2]))
    assert bits.tolist() == [[3976095849462003266, 1150994349463195221, 7060834197192227583]]
    noise = gumbel_noise(torch.tensor([42]), torch.tensor([7]), torch.tensor([0, 1, 2]))
    expected = [-math.log(-math.log1p(-(b + 0.5) / 2**63)) for b in bits[0].tolist()]
    torch.testing.assert_close(noise, torch.tensor([expected]), rtol=1e-5, atol=1e-5)


def test_a_value_does_not_depend_on_its_company() -> None:
    generator = torch.Generator().manual_seed(0)
    seeds, positions = torch.randint(-(2**62), 2**62, (9,), generator=generator), torch.arange(9) * 31
    whole = gumbel_noise(seeds, positions, torch.arange(5003))
    for row in (0, 4, 8):
        for ids in (torch.arange(5003), torch.tensor([17]), torch.randperm(5003, generator=generator)[:333]):
            alone = gumbel_noise(seeds[row : row + 1], positions[row : row + 1], ids[None, :])
            assert torch.equal(alone[0], whole[row, ids])


@pytest.mark.parametrize("vary", ["seed", "position", "token"])
def test_is_gumbel_along_every_key(vary: str) -> None:
    count = 40_000
    steps = torch.arange(count)
    one = torch.tensor([3])
    if vary == "token":
        noise = gumbel_noise(one, one, steps)[0]
    elif vary == "position":
        noise = gumbel_noise(one.expand(count), steps, one)[:, 0]
    else:
        noise = gumbel_noise(steps, one.expand(count), one)[:, 0]
    assert stats.kstest(noise.double().numpy(), stats.gumbel_r.cdf).pvalue > 1e-3
    x = noise.double() - noise.double().mean()
    for lag in (1, 2, 64):
        assert abs(float((x[lag:] * x[:-lag]).mean() / x.var())) < 0.02


def test_neighbouring_streams_are_independent() -> None:
    seeds = torch.tensor([5, 5, 6, 6])
    positions = torch.tensor([9, 10, 9, 10])
    noise = gumbel_noise(seeds, positions, torch.arange(50_000)).double()
    assert float((torch.corrcoef(noise) - torch.eye(4, dtype=torch.float64)).abs().max()) < 0.02


def test_every_bit_is_fair() -> None:
    bits = random_bits(torch.arange(500), torch.arange(500), torch.arange(200)).flatten()
    for bit in range(63):
        assert abs(float(((bits >> bit) & 1).double().mean()) - 0.5) < 0.008


def test_extreme_bits_stay_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    from dscale.speculation import noise

    monkeypatch.setattr(noise, "random_bits", lambda *_: torch.tensor([[0, MASK, MASK - 1]]))
    values = noise.gumbel_noise(torch.zeros(1), torch.zeros(1), torch.zeros(1))[0]
    assert bool(torch.isfinite(values).all())
    assert float(values[0]) == pytest.approx(math.log(2) * 64, rel=1e-5)
    assert float(values[1]) == pytest.approx(-math.log(24 * math.log(2)), rel=1e-4)
