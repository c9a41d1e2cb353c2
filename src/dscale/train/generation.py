"""Conversations written by the target, thousands of lanes in lockstep over a static cache.

A lane lives through four phases, each step one token, so that nothing but one captured decode step ever runs:
    TURN    the scripted beginning of the user turn is fed, then the target samples the turn to its end
    TAIL    instruction suffix, end of turn and the header of the assistant turn are fed
    ANSWER  the target answers, greedily or at the script's temperature, to its end token or the cap
    DONE    the lane waits until the host collects it and hands it the next script
All scripts share their first tokens (the system prompt): those keys stay in the cache when a lane is handed on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from dscale.config import DecoderConfig, require
from dscale.kernels.activation import silu_mul_torch
from dscale.kernels.norm import rms_norm_torch
from dscale.kernels.rotary import HeadShape, split_rotate
from dscale.layers.attention import head_shape
from dscale.layers.rotary import rotary_table
from dscale.models.decoder import DecoderLayer, Target
from dscale.train.lane_attention import lane_attention

TURN, TAIL, ANSWER, DONE = range(4)


@dataclass(frozen=True)
class GenerationConfig:
    """lanes: conversations at a time. max_length, turn_cap and answer_cap in tokens. min_p cuts unlikely tokens off."""

    lanes: int = 64
    max_length: int = 672
    turn_cap: int = 160
    answer_cap: int = 384
    turn_temperature: float = 1.0
    min_p: float = 0.02
    collect_every: int = 24  # steps between two looks at which lanes are done

    def __post_init__(self) -> None:
        for name in ("lanes", "max_length", "answer_cap", "collect_every"):
            require(getattr(self, name) > 0, f"generation.{name}: {getattr(self, name)} must be positive")
        require(0 < self.min_p < 1, f"generation.min_p: {self.min_p} must lie in (0, 1)")
        require(
            self.turn_temperature >= 0, f"generation.turn_temperature: {self.turn_temperature} must not be negative"
        )


@dataclass(frozen=True)
class TokenScripts:
    """Scripts as tokens, one row each.

    head int32 [N, P] with head_length [N]: prefix and beginning of the user turn; tail int32 [N,
    Q] with tail_length [N]: what
    is fed between the turn and the answer; complete bool [N]: the turn ends with the head; temperature [N] of the
    answer.
    shared: how many leading tokens all heads have in common.
    """

    head: np.ndarray
    head_length: np.ndarray
    tail: np.ndarray
    tail_length: np.ndarray
    complete: np.ndarray
    temperature: np.ndarray
    shared: int

    def __len__(self) -> int:
        return len(self.head_length)


@dataclass(frozen=True)
class Conversations:
    """Finished lanes: tokens uint16 [N, S]; turn, start, end int32 [N]; script int64 [N], the row of TokenScripts.

    Positions turn … are the user turn's text, start … end - 1 the answer (end token included where the target gave it).
    """

    tokens: np.ndarray
    turn: np.ndarray
    start: np.ndarray
    end: np.ndarray
    script: np.ndarray


@dataclass
class Lanes:
    """State of all lanes on the device, fixed addresses: tokens int32 [B, S], the rest [B] (tail [B, Q])."""

    tokens: Tensor
    position: Tensor
    phase: Tensor
    head_length: Tensor
    complete: Tensor
    tail: Tensor
    tail_length: Tensor
    tail_at: Tensor
    start: Tensor
    temperature: Tensor
    script: Tensor


def advance(lanes: Lanes, chosen: Tensor, end_token: int, config: GenerationConfig) -> list[Tensor]:
    """Next values of (tokens column, position, phase, tail_at, start), given the token chosen [B] at every lane."""
    following = lanes.position + 1
    scripted = (lanes.phase == TURN) & (following < lanes.head_length)
    ended = lanes.complete | (chosen == end_token) | (following - lanes.head_length >= config.turn_cap)
    phase = torch.where((lanes.phase == TURN) & ~scripted & ended, TAIL, lanes.phase)
    in_tail = phase == TAIL
    row = torch.arange(chosen.shape[0], device=chosen.device)
    ahead = lanes.tokens[row, following.clamp(max=config.max_length - 1)]
    token = torch.where(scripted, ahead, chosen.int())
    token = torch.where(in_tail, lanes.tail[row, lanes.tail_at.clamp(max=lanes.tail.shape[1] - 1)], token)
    tail_at = lanes.tail_at + in_tail
    answers = in_tail & (tail_at == lanes.tail_length)
    start = torch.where(answers, following + 1, lanes.start)
    finished = (lanes.phase == ANSWER) & ((token == end_token) | (following - start + 1 >= config.answer_cap))
    finished |= following >= config.max_length - 1
    phase = torch.where(answers, ANSWER, phase)
    idle = lanes.phase == DONE
    phase = torch.where(finished | idle, DONE, phase)
    token = torch.where(idle, lanes.tokens[row, lanes.position], token)
    position = torch.where(idle, lanes.position, following)
    return [token, position, phase, tail_at, start]


def choose(logits: Tensor, noise: Tensor, temperature: Tensor, min_p: float) -> Tensor:
    """Gumbel-max: logits [B, V], noise [B, V] exponential, temperature [B] (0 is greedy) → tokens [B]."""
    wide, warmth = logits.float(), temperature[:, None]
    floor = wide.amax(-1, keepdim=True) + warmth * float(np.log(min_p))
    gumbel = -noise.clamp_min(1e-20).log()  # 0 · inf must not happen
    return torch.where(wide >= floor, wide + warmth * gumbel, -torch.inf).argmax(-1)


def _open(normed: Tensor, qkv: Tensor, angles: Tensor, shape: HeadShape) -> tuple[Tensor, Tensor, Tensor]:
    return split_rotate(torch.nn.functional.linear(normed, qkv), angles, shape)


def _close(attended: Tensor, residual: Tensor, weights: list[Tensor], eps: float) -> tuple[Tensor, Tensor]:
    """A layer after its attention, and the norm that follows it."""
    output, post_norm, gate_up, down, next_norm = weights
    residual = residual + torch.nn.functional.linear(attended, output)
    normed = rms_norm_torch(residual, post_norm, eps)
    fed = torch.nn.functional.linear(silu_mul_torch(torch.nn.functional.linear(normed, gate_up)), down)
    residual = residual + fed
    return rms_norm_torch(residual, next_norm, eps), residual


def _close_open(
    attended: Tensor, residual: Tensor, weights: list[Tensor], qkv: Tensor, angles: Tensor, shape: HeadShape
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    normed, residual = _close(attended, residual, weights, shape.norm_eps)
    return (*_open(normed, qkv, angles, shape), residual)


class LaneGenerator:
    """Owns lanes and cache, and runs the decode step; on CUDA its pieces are compiled and the step is one graph."""

    def __init__(self, target: Target, config: GenerationConfig, tail_width: int, end_token: int) -> None:
        self.target, self.config, self.end_token = target, config, end_token
        decoder = target.config.decoder
        require(not (decoder.qk_norm or decoder.qkv_bias or decoder.windows), "generation: only plain llama targets")
        self.device = target.embedding.device
        self.shape = head_shape(decoder)
        self.table = rotary_table(decoder.rope, decoder.head_dim, config.max_length, self.device)
        self.cache = self._cache(decoder)
        self.lanes = self._lanes(tail_width)
        compiled: Callable = torch.compile if self.device.type == "cuda" else lambda function: function
        self.open, self.close, self.close_open = compiled(_open), compiled(_close), compiled(_close_open)
        self.choose, self.advance = compiled(choose), compiled(advance)
        self.graph: torch.cuda.CUDAGraph | None = None

    def _cache(self, decoder: DecoderConfig) -> list[tuple[Tensor, Tensor]]:
        size = (self.config.lanes, decoder.num_kv_heads, self.config.max_length, decoder.head_dim)
        dtype = self.target.embedding.dtype
        made = [torch.zeros(size, dtype=dtype, device=self.device) for _ in range(2 * decoder.num_layers)]
        return list(zip(made[::2], made[1::2], strict=True))

    def _lanes(self, tail_width: int) -> Lanes:
        def zeros(*size: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(*size, dtype=dtype, device=self.device)

        b = self.config.lanes
        return Lanes(
            tokens=zeros(b, self.config.max_length, dtype=torch.int32),
            position=zeros(b),
            phase=zeros(b) + DONE,
            head_length=zeros(b),
            complete=zeros(b, dtype=torch.bool),
            tail=zeros(b, tail_width, dtype=torch.int32),
            tail_length=zeros(b),
            tail_at=zeros(b),
            start=zeros(b),
            temperature=zeros(b, dtype=torch.float32),
            script=zeros(b) - 1,
        )

    @torch.no_grad()
    def _step(self) -> None:
        lanes, row = self.lanes, torch.arange(self.config.lanes, device=self.device)
        logits = self.target.logits(self.hidden(lanes.tokens[row, lanes.position].long(), lanes.position))
        noise = torch.empty(logits.shape, dtype=torch.float32, device=self.device).exponential_()
        answering = (lanes.phase >= TAIL).float()
        temperature = self.config.turn_temperature * (1 - answering) + lanes.temperature * answering
        chosen = self.choose(logits, noise, temperature, self.config.min_p)
        token, position, phase, tail_at, start = self.advance(lanes, chosen, self.end_token, self.config)
        lanes.tokens[row, position] = token
        for held, new in ((lanes.position, position), (lanes.phase, phase), (lanes.tail_at, tail_at)):
            held.copy_(new)
        lanes.start.copy_(start)

    def hidden(self, ids: Tensor, positions: Tensor) -> Tensor:
        """One token per lane at positions [B] through all layers → normed hidden [B, H]; keys and values are "
        "written."""
        stack = self.target.stack
        layers: list[DecoderLayer] = list(stack.layers)  # type: ignore[arg-type]
        angles, scale = self.table[positions], self.shape.head_dim**-0.5
        residual = self.target.embed(ids)
        normed = rms_norm_torch(residual, layers[0].input_norm.weight, self.shape.norm_eps)
        q, k, v = self.open(normed, layers[0].qkv.weight, angles, self.shape)
        for index, layer in enumerate(layers):
            attended = lane_attention(q, k, v, *self.cache[index], positions, scale)
            last = index + 1 == len(layers)
            norm = stack.norm if last else layers[index + 1].input_norm
            weights = [
                layer.output.weight,
                layer.post_norm.weight,
                layer.gate_up.weight,
                layer.down.weight,
                norm.weight,
            ]
            if last:
                return self.close(attended, residual, weights, self.shape.norm_eps)[0]
            qkv = layers[index + 1].qkv.weight
            q, k, v, residual = self.close_open(attended, residual, weights, qkv, angles, self.shape)
        raise AssertionError("a decoder has at least one layer")

    def step(self) -> None:
        """One token for every lane. On CUDA the third call captures the graph that all later calls replay."""
        if self.device.type != "cuda":
            self._step()
        elif self.graph is None:
            for _ in range(2):
                self._step()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._step()
            self.graph = graph
        else:
            self.graph.replay()

    def hand_out(self, lanes: Tensor, scripts: TokenScripts, first: int, fresh: bool) -> int:
        """Give the lanes [n] the scripts from `first` on; returns how many got one. fresh: the cache has no "
        "prefix yet."""
        count = min(len(lanes), len(scripts) - first)
        taken, state = lanes[:count], self.lanes
        rows = slice(first, first + count)

        def put(held: Tensor, value: np.ndarray | int) -> None:
            if isinstance(value, np.ndarray):
                held[taken] = torch.from_numpy(np.ascontiguousarray(value)).to(self.device, held.dtype)
            else:
                held[taken] = value

        heads = torch.from_numpy(np.ascontiguousarray(scripts.head[rows])).to(self.device)
        state.tokens[taken, : heads.shape[1]] = heads
        put(state.head_length, scripts.head_length[rows])
        put(state.complete, scripts.complete[rows])
        put(state.tail, scripts.tail[rows])
        put(state.tail_length, scripts.tail_length[rows])
        put(state.temperature, scripts.temperature[rows])
        put(state.script, np.arange(first, first + count))
        for held in (state.tail_at, state.start, state.phase):
            put(held, 0)
        put(state.position, 0 if fresh else scripts.shared - 1)
        return count

    def collect(self, lanes: Tensor, shared: int) -> Conversations:
        """Copy lanes [n] to the host as they stand."""
        state = self.lanes
        end = state.position[lanes] + 1
        tokens = state.tokens[lanes].to("cpu").numpy().astype(np.uint16)
        numbers = torch.stack([state.start[lanes], end, state.script[lanes]]).cpu().numpy()
        state.script[lanes] = -1
        turn = np.full(len(numbers[0]), shared, np.int32)
        return Conversations(tokens, turn, numbers[0].astype(np.int32), numbers[1].astype(np.int32), numbers[2])


def generate(
    generator: LaneGenerator, scripts: TokenScripts, deadline: float | None = None, keep_cut: int | None = None
) -> Iterator[Conversations]:
    """Run all scripts, or as many as fit before the deadline (time.monotonic seconds); yields what lanes finished.

    keep_cut: at the deadline also yield unfinished lanes whose answer has at least that many tokens.
    """
    config, state = generator.config, generator.lanes
    require(scripts.head.shape[1] < config.max_length, f"generation.max_length: {config.max_length} is under the heads")
    state.phase.fill_(DONE)
    state.script.fill_(-1)
    given = generator.hand_out(torch.arange(config.lanes, device=generator.device), scripts, 0, fresh=True)
    while True:
        for _ in range(config.collect_every):
            generator.step()
        done = ((state.phase == DONE) & (state.script >= 0)).nonzero().flatten()
        if len(done):
            yield generator.collect(done, scripts.shared)
        if given < len(scripts):
            idle = (state.phase == DONE).nonzero().flatten()
            given += generator.hand_out(idle, scripts, given, fresh=False) if len(idle) else 0
        elif not bool((state.phase != DONE).any()):
            return
        if deadline is not None and time.monotonic() > deadline:
            break
    if keep_cut is not None:
        long = (state.phase == ANSWER) & (state.position + 1 - state.start >= keep_cut)
        if bool(long.any()):
            yield generator.collect(long.nonzero().flatten(), scripts.shared)


def join(parts: list[Conversations]) -> Conversations:
    """One Conversations out of many."""
    require(bool(parts), "generation: no conversation was finished before the deadline")
    return Conversations(*(np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(Conversations)))
