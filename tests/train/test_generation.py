"""Lanes against a plain dense decoding loop."""

import numpy as np
import torch

from dscale.layers.attention import DenseAttention
from dscale.layers.rotary import rotary_table
from dscale.train.generation import GenerationConfig, LaneGenerator, TokenScripts, choose, generate, join
from dscale.train.lane_attention import lane_attention_torch

from .tiny import VOCAB, tiny_target

END = 2


def scripts(count, temperature=0.0):
    rng = np.random.default_rng(0)
    length = rng.integers(4, 9, count)
    head = np.zeros((count, 9), np.int32)
    for row in range(count):
        head[row, :3] = (10, 11, 12)
        head[row, 3 : length[row]] = rng.integers(5, VOCAB, length[row] - 3)
    tail = np.tile(np.array([20, 21], np.int32), (count, 1))
    complete = np.arange(count) % 2 == 0
    return TokenScripts(
        head,
        length.astype(np.int32),
        tail,
        np.full(count, 2, np.int32),
        complete,
        np.full(count, temperature, np.float32),
        3,
    )


def run(count=7, lanes=3, **settings):
    values = {
        "lanes": lanes,
        "max_length": 40,
        "turn_cap": 4,
        "answer_cap": 12,
        "turn_temperature": 0.0,
        "collect_every": 3,
    }
    generator = LaneGenerator(tiny_target(), GenerationConfig(**(values | settings)), 2, END)
    made = scripts(count)
    return made, generator, join(list(generate(generator, made)))


def dense_next(target, tokens):
    decoder = target.config.decoder
    table = rotary_table(decoder.rope, decoder.head_dim, 64, torch.device("cpu"))
    hidden, _ = target(torch.tensor(tokens), DenseAttention(decoder, table, 1, len(tokens)))
    return int(target.logits(hidden)[-1].argmax())


def test_every_script_is_answered_as_a_dense_loop_would():
    made, generator, talks = run()
    assert sorted(talks.script.tolist()) == list(range(7))
    for row, script in enumerate(talks.script.tolist()):
        tokens = made.head[script, : made.head_length[script]].tolist()
        if not made.complete[script]:
            for _ in range(4):
                following = dense_next(generator.target, tokens)
                if following == END:
                    break
                tokens.append(following)
        tokens += [20, 21]
        assert talks.start[row] == len(tokens)
        for _ in range(12):
            tokens.append(dense_next(generator.target, tokens))
            if tokens[-1] == END:
                break
        assert talks.tokens[row, : talks.end[row]].tolist() == tokens
        assert talks.turn[row] == 3


def test_a_deadline_yields_what_is_done_and_long_enough_cuts():
    generator = LaneGenerator(
        tiny_target(), GenerationConfig(lanes=2, max_length=40, answer_cap=20, collect_every=14), 2, END
    )
    parts = list(generate(generator, scripts(4), deadline=0.0, keep_cut=1))
    for part in parts:
        assert (part.end > part.start).all()
        assert (part.start > 0).all()


def test_choose_is_argmax_when_cold_and_samples_the_softmax_when_warm():
    logits = torch.log(torch.tensor([0.6, 0.3, 0.095, 0.005])).repeat(20000, 1)
    noise = torch.empty(logits.shape).exponential_(generator=torch.Generator().manual_seed(0))
    assert (choose(logits, noise, torch.zeros(20000), 0.02) == 0).all()
    share = torch.bincount(choose(logits, noise, torch.ones(20000), 0.02), minlength=4) / 20000
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
