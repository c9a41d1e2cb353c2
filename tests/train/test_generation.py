"""Lanes against a plain dense decoding loop, and against the serving engine."""

import numpy as np
import pytest
import torch

from dscale.config import InputError
from dscale.layers.attention import DenseAttention
from dscale.layers.rotary import rotary_table
from dscale.models.loader import LoadedTarget, random_target
from dscale.speculation.noise import streams
from dscale.speculation.sampling import RowParams, draw
from dscale.train.generation import EngineGenerator, GenerationConfig
from dscale.train.lane_attention import lane_attention_torch
from dscale.train.lanes import LaneGenerator, choose
from dscale.train.scripts import TokenScripts
from tests.conftest import tiny_config

from .tiny import VOCAB, tiny_target

END = 2
SETTINGS = {"max_length": 40, "turn_cap": 4, "answer_cap": 12, "turn_temperature": 0.0, "collect_every": 3, "lanes": 3}


def scripts(count, temperature=0.0, vocabulary=VOCAB):
    """Every second turn is complete; heads of 4 … 8 tokens that share three, tails of two."""
    rng = np.random.default_rng(0)
    length = rng.integers(4, 9, count)
    head = np.zeros((count, 9), np.int32)
    for row in range(count):
        head[row, :3] = (10, 11, 12)
        head[row, 3 : length[row]] = rng.integers(5, vocabulary, length[row] - 3)
    number = np.arange(count)
    return TokenScripts(
        head=head,
        head_length=length.astype(np.int32),
        tail=np.tile(np.array([20, 21], np.int32), (count, 1)),
        tail_length=np.full(count, 2, np.int32),
        closing=np.full(count, 2, np.int32),
        turn=np.full(count, 3, np.int32),
        complete=number % 2 == 0,
        temperature=np.full(count, temperature, np.float32),
        turn_seed=1000 + number,
        seed=2000 + number,
        script=number,
        answer=np.zeros(count, np.int32),
    )


def same(one, other):
    return all(np.array_equal(a, other.arrays()[name]) for name, a in one.arrays().items())


def text(talks, row):
    return talks.tokens[talks.bounds[row] : talks.bounds[row + 1]].tolist()


def silent(tokens):
    pass


def loaded(family, **changes):
    target = random_target(tiny_config(family, **changes), seed=4)
    return LoadedTarget(target, target.config, None, "tiny")


def dense_next(target, tokens):
    decoder = target.config.decoder
    table = rotary_table(decoder.rope, decoder.head_dim, 64, torch.device("cpu"))
    hidden, _ = target(torch.tensor(tokens), DenseAttention(decoder, table, 1, len(tokens)))
    return int(target.logits(hidden)[-1].argmax())


def test_every_script_is_answered_as_a_dense_loop_would():
    generator = LaneGenerator(tiny_target(), GenerationConfig(**SETTINGS), (END,))
    made, counted = scripts(7), []
    talks = generator.answer(made, counted.append)
    assert talks.script.tolist() == list(range(7))
    for script in range(7):
        tokens = made.head[script, : made.head_length[script]].tolist()
        if not made.complete[script]:
            for _ in range(4):
                following = dense_next(generator.target, tokens)
                if following == END:
                    break
                tokens.append(following)
        assert talks.turn_end[script] == len(tokens)
        tokens += [20, 21]
        assert talks.start[script] == len(tokens)
        for _ in range(12):
            tokens.append(dense_next(generator.target, tokens))
            if tokens[-1] == END:
                break
        assert text(talks, script) == tokens
        assert talks.ended[script] == (tokens[-1] == END)
    assert sum(counted) == (talks.end - talks.start).sum()
    turns = talks.turns
    assert turns.tokens[turns.bounds[1] : turns.bounds[2]].tolist() == text(talks, 1)[3 : talks.turn_end[1]]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_lanes_and_engine_write_the_same_text_for_every_family(family, temperature):
    changes = {"output_bias": True, "mlp_bias": True} if family == "llama" else {}
    target = loaded(family, eos_token_ids=(2, 7), **changes)
    config = GenerationConfig(**(SETTINGS | {"turn_temperature": temperature, "requests": 4}))
    made = scripts(9, temperature, vocabulary=64)
    by_lanes = LaneGenerator(target.model, config, (2, 7, 21, 40, 41)).answer(made, silent)
    by_engine = EngineGenerator(target, config, (2, 7, 21, 40, 41)).answer(made, silent)
    assert same(by_lanes, by_engine)
    assert len({tuple(text(by_lanes, row)) for row in range(9)}) == 9
    if temperature:
        assert by_lanes.ended.any()


def test_a_vocabulary_over_65535_keeps_its_token_ids():
    target = loaded("qwen3", vocab_size=70000, num_layers=2)
    config = GenerationConfig(**SETTINGS)
    made = scripts(4, vocabulary=70000)
    talks = LaneGenerator(target.model, config, (END,)).answer(made, silent)
    assert talks.tokens.max() > 65535
    assert same(talks, EngineGenerator(target, config, (END,)).answer(made, silent))


def test_sampled_text_depends_neither_on_lanes_nor_on_what_is_made_beside_it():
    made = scripts(8, 1.0)
    wide, narrow = (
        LaneGenerator(tiny_target(), GenerationConfig(**(SETTINGS | {"lanes": lanes, "turn_temperature": 1.0})), (END,))
        for lanes in (8, 2)
    )
    whole = wide.answer(made, silent)
    assert same(whole, narrow.answer(made, silent))
    backwards = narrow.answer(made.take(np.arange(7, 3, -1)), silent)
    assert [text(backwards, row) for row in range(4)] == [text(whole, 7 - row) for row in range(4)]
    other = wide.answer(scripts(8, 0.0), silent)
    assert not same(whole, other)


def test_lanes_refuse_windows_and_say_so():
    target = loaded("qwen3", windows=(None, 16, None, None, None))
    with pytest.raises(InputError, match="sliding windows shorter than a conversation; use engine"):
        LaneGenerator(target.model, GenerationConfig(**SETTINGS), (END,))
    wide = loaded("qwen3", windows=(None, 40, None, None, None))
    assert LaneGenerator(wide.model, GenerationConfig(**SETTINGS), (END,)).count == 3


def test_choose_is_the_engines_draw():
    logits = torch.randn(64, 200, generator=torch.Generator().manual_seed(0)) * 3
    temperature = torch.tensor([0.0, 0.5, 1.0, 1.5]).repeat(16)
    seed, position, ids = torch.arange(64) * 977, torch.arange(64) % 7, torch.arange(200)
    got = choose(logits, streams(seed, position), ids, temperature, float(np.log(0.02)))
    floors = torch.full((64,), 0.02)
    nothing = torch.zeros(64, dtype=torch.int64)
    want = draw(logits, RowParams(temperature, nothing, torch.ones(64), floors, seed, position), all_greedy=False)
    assert torch.equal(got, want)
    assert torch.equal(got[::4], logits[::4].argmax(-1))


def test_choose_samples_the_softmax_above_the_floor():
    logits = torch.log(torch.tensor([0.6, 0.3, 0.095, 0.005])).repeat(20000, 1)
    stream = streams(torch.arange(20000), torch.zeros(20000).long())
    drawn = choose(logits, stream, torch.arange(4), torch.ones(20000), float(np.log(0.02)))
    share = torch.bincount(drawn, minlength=4) / 20000
    assert torch.allclose(share, torch.tensor([0.603, 0.3015, 0.0955, 0.0]), atol=0.015)


def test_lane_attention_equals_a_loop_over_lanes():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(3, heads, 8, generator=generator) for heads in (4, 2, 2))
    keys, values = (torch.randn(3, 2, 10, 8, generator=generator) for _ in range(2))
    positions = torch.tensor([0, 4, 9])
    out = lane_attention_torch(q, k, v, keys, values, positions, 0.3).view(3, 4, 8)
    for lane, at in enumerate(positions.tolist()):
        assert torch.equal(keys[lane, :, at], k[lane])
        for head in range(4):
            scores = keys[lane, head // 2, : at + 1] @ q[lane, head] * 0.3
            assert torch.allclose(out[lane, head], scores.softmax(0) @ values[lane, head // 2, : at + 1], atol=1e-5)
