import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from dscale.kernels import native
from dscale.speculation import sampling
from dscale.speculation.acceptance import accept, clip_at_end
from dscale.speculation.noise import gumbel_noise
from dscale.speculation.packing import pack
from dscale.speculation.sampling import RowParams, draw, draw_filtered, draw_on_device, logprobs


def rows(count: int, **fields: object) -> RowParams:
    """Parameters of `count` rows; a field given as a number holds for all of them."""
    defaults = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0, "position": 0, **fields}
    kinds = {"temperature": torch.float32, "top_p": torch.float32, "min_p": torch.float32}
    return RowParams(
        **{k: torch.as_tensor(v, dtype=kinds.get(k, torch.int64)).expand(count) for k, v in defaults.items()}
    )


def kept_by_definition(logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float) -> list[int]:
    """Ids that the filters keep, one token at a time in Python floats."""
    x = [value / temperature for value in logits]
    order = sorted(range(len(x)), key=lambda v: (-x[v], v))
    weight = {v: math.exp(x[v] - x[order[0]]) for v in order}
    order = [v for v in order if weight[v] >= min_p]
    if top_k:
        order = order[:top_k]
    total, mass = sum(weight[v] for v in order), 0.0
    kept: list[int] = []
    for v in order:
        if kept and top_p < 1 and mass >= top_p * total:
            break
        kept.append(v)
        mass += weight[v]
    return kept


def by_definition(logits: Tensor, params: RowParams, row: int) -> int:
    """The drawn token of one row: the kept token of highest logit / temperature + noise."""
    p = params.at(torch.tensor([row]))
    temperature, top_k = float(p.temperature), int(p.top_k)
    if temperature == 0:
        return logits[row].tolist().index(float(logits[row].max()))
    kept = kept_by_definition(logits[row].tolist(), temperature, top_k, float(p.top_p), float(p.min_p))
    noise = gumbel_noise(p.seed, p.position, torch.tensor(kept))[0]
    return kept[int((logits[row, kept].float() / temperature + noise).argmax())]


def mixed_rows(count: int, generator: torch.Generator) -> RowParams:
    def choice(*values: float) -> Tensor:
        return torch.tensor(values)[torch.randint(len(values), (count,), generator=generator)]

    return RowParams(
        temperature=choice(0.0, 0.6, 1.0, 1.7),
        top_k=choice(0, 0, 1, 5, 50, 400, 100_000).long(),
        top_p=choice(1.0, 1.0, 0.3, 0.8, 0.95, 0.999),
        min_p=choice(0.0, 0.0, 0.02, 0.3, 1.0),
        seed=torch.randint(-(2**62), 2**62, (count,), generator=generator),
        position=torch.randint(0, 5000, (count,), generator=generator),
    )


@pytest.mark.parametrize(("vocab", "scale"), [(11, 2.0), (700, 3.0), (6000, 1.0)])
def test_equals_the_definition(vocab: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits, params = torch.randn(150, vocab, generator=generator) * scale, mixed_rows(150, generator)
    expected = [by_definition(logits, params, row) for row in range(150)]
    assert draw(logits, params, all_greedy=False).tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_depends_on_itself_alone(dtype: torch.dtype) -> None:
    """In any batch, in any order, by candidates or by sorting the whole row: the same token."""
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(60, 6000, generator=generator) * 2).to(dtype)  # in bfloat16 many logits are equal
    params = mixed_rows(60, generator)
    together = draw(logits, params, all_greedy=False)
    order = torch.randperm(60, generator=generator)
    assert torch.equal(draw(logits[order], params.at(order), all_greedy=False), together[order])
    for row in range(0, 60, 7):
        index = torch.tensor([row])
        assert torch.equal(draw(logits[index], params.at(index), all_greedy=False), together[index])
    drawn = (params.temperature > 0).nonzero().flatten()
    chosen = params.at(drawn)
    whole, sure = draw_filtered(logits[drawn].float() / chosen.temperature[:, None], chosen, 6000)
    assert bool(sure.all())
    assert torch.equal(whole, together[drawn])


def test_candidates_are_enough_for_usual_rows_and_say_when_not() -> None:
    peaked = torch.randn(20, 50_000, generator=torch.Generator().manual_seed(2)) * 6
    params = rows(20, temperature=0.8, top_p=0.95)
    assert bool(draw_filtered(peaked / 0.8, params, 320)[1].all())
    assert not bool(draw_filtered(torch.zeros(20, 50_000), params, 320)[1].any())
    assert not bool(draw_filtered(peaked, rows(20, top_k=1000, top_p=0.9), 320)[1].any())


def test_greedy_takes_the_first_of_equal_logits() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0], [0.0, 1.0, 5.0]])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert draw(logits.to(dtype), rows(3, temperature=0.0), all_greedy=True).tolist() == [1, 0, 2]
        assert draw(logits.to(dtype), rows(3, temperature=0.0), all_greedy=False).tolist() == [1, 0, 2]


def draws(logits: Tensor, count: int, **fields: object) -> Tensor:
    """Tokens [count] of one row of logits [V] under as many seeds."""
    params = rows(count, seed=torch.arange(count) * 7919 + 13, position=5, **fields)
    return draw(logits.expand(count, -1), params, all_greedy=False)


def p_value(tokens: Tensor, probabilities: Tensor) -> float:
    """Chi-square of token counts against probabilities [V]; tokens of no probability must not occur."""
    seen = torch.bincount(tokens, minlength=probabilities.shape[0])
    possible = probabilities > 0
    assert int(seen[~possible].sum()) == 0
    expected = probabilities[possible].double() / probabilities[possible].double().sum() * tokens.shape[0]
    return float(stats.chisquare(seen[possible].numpy(), expected.numpy()).pvalue)


LOGITS = torch.randn(11, generator=torch.Generator().manual_seed(4)) * 1.5


def filtered(
    logits: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Tensor:
    """The distribution [V] that sampling should have, float64."""
    kept = kept_by_definition(logits.tolist(), temperature, top_k, top_p, min_p)
    masked = torch.full((logits.shape[0],), -torch.inf, dtype=torch.float64)
    masked[kept] = logits[kept].double() / temperature
    return masked.softmax(-1)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0, "top_k": 4},
        {"top_p": 0.7},
        {"min_p": 0.2},
        {"temperature": 1.3, "top_k": 8, "top_p": 0.9, "min_p": 0.05},
    ],
)
def test_distribution_over_seeds(fields: dict[str, float]) -> None:
    tokens = draws(LOGITS, 20_000, **fields)
    assert p_value(tokens, filtered(LOGITS, **fields)) > 1e-3  # type: ignore[arg-type]


def test_equal_logits_at_the_edge_keep_the_lower_ids() -> None:
    tokens = draws(torch.tensor([0.0, 1.0, 0.0, 0.0, 1.0]), 500, top_k=3)
    assert set(tokens.tolist()) == {0, 1, 4}
    tokens = draws(torch.zeros(8), 500, top_p=0.5)
    assert set(tokens.tolist()) == {0, 1, 2, 3}


def test_forbidden_tokens_are_never_drawn() -> None:
    logits = torch.full((400,), -torch.inf)
    logits[[5, 17]] = torch.tensor([0.0, -1.0])
    for fields in ({}, {"top_p": 0.99}, {"top_k": 50}, {"min_p": 1e-6}):
        tokens = draws(logits, 300, **fields)
        assert set(tokens.tolist()) == {5, 17}


def test_seeds_and_positions_change_the_draw_and_repeat_it() -> None:
    logits = torch.zeros(1, 1000)
    base = draw(logits, rows(1, seed=3, position=8), all_greedy=False)
    assert torch.equal(base, draw(logits, rows(1, seed=3, position=8), all_greedy=False))
    others = [draw(logits, rows(1, seed=3 + i, position=8 + j), False).item() for i in (0, 1) for j in (0, 1)]
    assert len(set(others)) == 4


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**31), st.integers(2, 40))
def test_other_devices_take_the_same_token(seed: int, vocab: int) -> None:
    """The way that reads nothing back, as on a GPU, gives what the CPU's way gives."""
    generator = torch.Generator().manual_seed(seed)
    logits, params = torch.randn(6, vocab, generator=generator), mixed_rows(6, generator)
    expected = draw_on_device(logits, params, logits.argmax(-1))
    assert torch.equal(draw(logits, params, all_greedy=False), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("vocab", "scale"), [(11, 2.0), (700, 3.0), (6001, 0.3), (49152, 2.5)])
def test_the_native_version_draws_the_same_tokens(vocab: int, scale: float, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(vocab)
    count = 200 if vocab < 1000 else 40
    logits, params = (torch.randn(count, vocab, generator=generator) * scale).to(dtype), mixed_rows(count, generator)
    logits[:, 3] = -torch.inf
    plain = draw(logits, params, all_greedy=False)  # gradients are on, so this is torch
    with torch.inference_mode():
        if not native.usable(logits):
            pytest.skip(f"native kernels: {native.status()}")
        assert torch.equal(draw(logits, params, all_greedy=False), plain)
        order = torch.randperm(count, generator=generator)
        assert torch.equal(draw(logits[order], params.at(order), all_greedy=False), plain[order])


def test_candidate_tiers_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(8)
    logits, params = torch.randn(80, 500, generator=generator).bfloat16(), mixed_rows(80, generator)
    expected = draw(logits, params, all_greedy=False)
    for tiers in ((), (3,), (2, 50), (499,)):
        monkeypatch.setattr(sampling, "CANDIDATES", tiers)
        assert torch.equal(draw(logits, params, all_greedy=False), expected)


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = torch.randn(4, 30, generator=torch.Generator().manual_seed(5))
    y = torch.tensor([3, 0, 29, 7])
    result = logprobs(logits, y, 5)
    table = logits.double().softmax(-1).log()
    torch.testing.assert_close(result.chosen.double(), table[torch.arange(4), y], rtol=1e-5, atol=1e-5)
    ordered = table.sort(dim=-1, descending=True)
    torch.testing.assert_close(result.values.double(), ordered.values[:, :5], rtol=1e-5, atol=1e-5)
    assert torch.equal(result.ids, ordered.indices[:, :5])
    assert torch.equal(logprobs(logits, y, 20).ids, ordered.indices[:, :20])
    assert torch.equal(logprobs(logits[:, :7], y % 7, 20).ids, logits[:, :7].sort(dim=-1, descending=True).indices)
    assert logprobs(logits, y, 0).values.shape == (4, 0)
    assert logprobs(logits.bfloat16(), y, 1).chosen.dtype == torch.float32


VOCAB, WIDTH = 11, 4


def speculate(count: int, first: Tensor, second: Tensor, drafts: Tensor, k: int, **fields: object) -> Tensor:
    """The first two tokens [count, 2] of `count` seeded requests, by as many decode steps as it takes.

    The target is a Markov chain: first [V] are the logits after the anchor, second [V, V] those after each token.
    drafts [count, W-1] are tried in the first step with k slots; later steps verify the anchor alone.
    """
    seeds = torch.arange(count) * 104_729 + 7

    def step(row_logits: Tensor, column: Tensor) -> Tensor:
        params = rows(row_logits.shape[0], seed=seeds.repeat_interleave(column.shape[0]), **fields)
        params = RowParams(**{**params.__dict__, "position": (10 + column + 1).repeat(count)})
        return draw(row_logits, params, all_greedy=False)

    block = torch.cat([first.expand(count, 1, -1), second[drafts]], dim=1)[:, :k]
    slots = torch.full((count,), k)
    y = step(block.reshape(-1, VOCAB), torch.arange(k))
    outcome = accept(drafts, slots, y, pack(slots, count * k).starts)
    emitted, _ = clip_at_end(outcome.tokens, outcome.emitted, torch.full((count, 1), -1), torch.full((count,), 2))
    later = step(second[outcome.next_anchor], torch.tensor([1]))
    return torch.stack([outcome.tokens[:, 0], outcome.tokens[:, 1].where(emitted == 2, later)], dim=1)


@pytest.mark.parametrize("fields", [{"temperature": 0.8, "top_p": 0.9}, {}, {"temperature": 1.5, "top_k": 6}])
def test_speculation_keeps_the_targets_distribution(fields: dict[str, float]) -> None:
    """Joint distribution of two tokens, 24,000 requests with random drafts; and equality with no speculation at all."""
    generator = torch.Generator().manual_seed(6)
    first = torch.randn(VOCAB, generator=generator)
    second = torch.randn(VOCAB, VOCAB, generator=generator) * 1.3
    count = 24_000
    drafts = torch.randint(0, VOCAB, (count, WIDTH - 1), generator=generator)
    drafts[: count // 2, 0] = int(first.argmax())  # half of the drafters are good
    tokens = speculate(count, first, second, drafts, WIDTH, **fields)
    head = filtered(first, **fields)  # type: ignore[arg-type]
    joint = torch.stack([head[v] * filtered(second[v], **fields) for v in range(VOCAB)])  # type: ignore[arg-type]
    codes = tokens[:, 0] * VOCAB + tokens[:, 1]
    common = (joint.flatten() * count >= 5).nonzero().flatten()  # rare pairs are pooled, as chi-square needs
    seen = torch.bincount(codes, minlength=VOCAB * VOCAB).double()
    expected = joint.flatten() * count
    observed = torch.cat([seen[common], (seen.sum() - seen[common].sum())[None]])
    wanted = torch.cat([expected[common], (count - expected[common].sum())[None]])
    if wanted[-1] < 1e-6:
        assert observed[-1] == 0
        observed, wanted = observed[:-1], wanted[:-1]
    assert float(stats.chisquare(observed.numpy(), wanted.numpy()).pvalue) > 1e-3
    for k in (1, 2):
        assert torch.equal(speculate(count, first, second, drafts, k, **fields), tokens)
    accepted = (tokens[:, 0] == drafts[:, 0]).float().mean()
    assert accepted > 0.1
