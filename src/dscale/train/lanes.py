"""Conversations written by the target, thousands of lanes in lockstep over a static cache.

A lane lives through four phases, each step one token, so that nothing but one captured decode step ever runs:
    TURN    the scripted beginning of the user turn is fed, then the target samples the turn to its end
    TAIL    instruction suffix, end of turn and the header of the assistant turn are fed
    ANSWER  the target answers, greedily or at the script's temperature, to its end token or the cap
    DONE    the lane waits until the host collects it and hands it the next script
All scripts share their first tokens (the system prompt): those keys stay in the cache when a lane is handed on.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from dscale.config import DecoderConfig, InputError, require
from dscale.kernels.activation import silu_mul_torch
from dscale.kernels.norm import rms_norm_torch
from dscale.kernels.rotary import HeadShape, split_rotate
from dscale.layers.attention import head_shape
from dscale.layers.rotary import rotary_table
from dscale.models.decoder import DecoderLayer, Target
from dscale.speculation.noise import stream_noise, streams
from dscale.train.generation import Conversations, GenerationConfig, Progress, assemble
from dscale.train.lane_attention import lane_attention
from dscale.train.scripts import TokenScripts

TURN, TAIL, ANSWER, DONE = range(4)
MEMORY_SHARE = 0.6  # of free device memory that the lanes' cache may take


@dataclass
class Lanes:
    """State of all lanes on the device, fixed addresses: tokens int32 [B, S], the rest [B] (tail [B, S])."""

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
    turn_seed: Tensor
    seed: Tensor
    row: Tensor  # of TokenScripts, -1: none


def is_end(token: Tensor, ends: Tensor) -> Tensor:
    """Which tokens [B] are among ends [E]."""
    return (token[:, None] == ends).any(-1)


def advance(lanes: Lanes, chosen: Tensor, ends: Tensor, config: GenerationConfig) -> list[Tensor]:
    """Next values of (tokens column, position, phase, tail_at, start), given the token chosen [B] at every lane."""
    following = lanes.position + 1
    scripted = (lanes.phase == TURN) & (following < lanes.head_length)
    ended = lanes.complete | is_end(chosen, ends) | (following - lanes.head_length >= config.turn_cap)
    phase = torch.where((lanes.phase == TURN) & ~scripted & ended, TAIL, lanes.phase)
    in_tail = phase == TAIL
    row = torch.arange(chosen.shape[0], device=chosen.device)
    ahead = lanes.tokens[row, following.clamp(max=config.max_length - 1)]
    token = torch.where(scripted, ahead, chosen.int())
    token = torch.where(in_tail, lanes.tail[row, lanes.tail_at.clamp(max=lanes.tail.shape[1] - 1)], token)
    tail_at = lanes.tail_at + in_tail
    answers = in_tail & (tail_at == lanes.tail_length)
    start = torch.where(answers, following + 1, lanes.start)
    finished = (lanes.phase == ANSWER) & (is_end(token, ends) | (following - start + 1 >= config.answer_cap))
    finished |= following >= config.max_length - 1
    phase = torch.where(answers, ANSWER, phase)
    idle = lanes.phase == DONE
    phase = torch.where(finished | idle, DONE, phase)
    token = torch.where(idle, lanes.tokens[row, lanes.position], token)
    position = torch.where(idle, lanes.position, following)
    return [token, position, phase, tail_at, start]


def choose(logits: Tensor, stream: Tensor, ids: Tensor, temperature: Tensor, log_min_p: float) -> Tensor:
    """Gumbel-max as speculation/sampling.py does it: logits [B, V] → tokens [B].

    stream int64 [B] (noise.streams of seed and position) and ids [V] (0 … V - 1) key the noise; temperature [B], 0 is
    greedy; tokens of less than exp(log_min_p) times the highest probability are out. Compiled it is one kernel that
    writes nothing [B, V] large: three 64-bit multiplications and two logarithms a token. streams and ids come from
    outside because compiled C++ takes signed overflow of single numbers for impossible, and compilers fold symbols.
    """
    hot = (temperature > 0)[:, None]
    scaled = logits.float() / torch.where(hot, temperature[:, None], 1.0)
    floor = scaled.amax(-1, keepdim=True) + torch.where(hot, log_min_p, 0.0)
    noise = torch.where(hot, stream_noise(stream, ids), 0.0)
    return torch.where(scaled >= floor, scaled + noise, -torch.inf).argmax(-1)


class LayerWeights:
    """What one lane step needs of a layer, biases and head norms None where the family has none."""

    def __init__(self, layer: DecoderLayer) -> None:
        norms = layer.head_norms()
        self.open = [layer.qkv.weight, layer.qkv.bias, norms.q, norms.k]
        self.close = [
            layer.output.weight, layer.output.bias, layer.post_norm.weight,
            layer.gate_up.weight, layer.gate_up.bias, layer.down.weight, layer.down.bias,
        ]  # fmt: skip


def _open(normed: Tensor, weights: list, angles: Tensor, shape: HeadShape) -> tuple[Tensor, Tensor, Tensor]:
    """From normed rows to rotated queries and keys, and values."""
    qkv, bias, q_norm, k_norm = weights
    return split_rotate(functional.linear(normed, qkv, bias), angles, shape, q_norm, k_norm)


def _close(attended: Tensor, residual: Tensor, weights: list, next_norm: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """A layer after its attention, and the norm that follows it."""
    output, output_bias, post_norm, gate_up, gate_up_bias, down, down_bias = weights
    residual = residual + functional.linear(attended, output, output_bias)
    normed = rms_norm_torch(residual, post_norm, eps)
    fed = functional.linear(silu_mul_torch(functional.linear(normed, gate_up, gate_up_bias)), down, down_bias)
    residual = residual + fed
    return rms_norm_torch(residual, next_norm, eps), residual


def _close_open(
    attended: Tensor, residual: Tensor, weights: list, next_norm: Tensor, following: list, angles: Tensor,
    shape: HeadShape,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    normed, residual = _close(attended, residual, weights, next_norm, shape.norm_eps)
    return (*_open(normed, following, angles, shape), residual)


def refusal(decoder: DecoderConfig, max_length: int, cuda: bool) -> str | None:
    """Why lanes cannot serve a target, or None when they can."""
    if any(window is not None and window < max_length for window in decoder.windows):
        return "the target has sliding windows shorter than a conversation"
    if cuda and (decoder.head_dim < 16 or decoder.head_dim & (decoder.head_dim - 1)):
        return f"heads of {decoder.head_dim}; the kernel takes powers of two from 16"
    return None


def lanes_that_fit(target: Target, config: GenerationConfig) -> int:
    """config.lanes, or the largest power of two whose cache takes MEMORY_SHARE of the free device memory."""
    device, decoder = target.embedding.device, target.config.decoder
    if device.type != "cuda":
        return config.lanes
    size = 2 * decoder.num_layers * decoder.num_kv_heads * decoder.head_dim * target.embedding.element_size()
    room = torch.cuda.mem_get_info(device)[0] * MEMORY_SHARE // (size * config.max_length + 4 * decoder.vocab_size)
    if room >= config.lanes:
        return config.lanes
    require(room >= 1, "generation.lanes: device memory holds not one lane; use the engine, or a shorter answer cap")
    return 1 << (int(room).bit_length() - 1)


class LaneGenerator:
    """Owns lanes and cache, and runs the decode step; on CUDA its pieces are compiled and the step is one graph."""

    def __init__(self, target: Target, config: GenerationConfig, ends: tuple[int, ...]) -> None:
        self.target, self.config, self.end_ids = target, config, ends
        decoder = target.config.decoder
        self.device = target.embedding.device
        reason = refusal(decoder, config.max_length, self.device.type == "cuda")
        if reason is not None:
            raise InputError(f"--generator lanes: {reason}; use engine")
        self.count = lanes_that_fit(target, config)
        self.shape = head_shape(decoder)
        self.table = rotary_table(decoder.rope, decoder.head_dim, config.max_length, self.device)
        self.ends = torch.tensor(ends, dtype=torch.int64, device=self.device)
        self.ids = torch.arange(decoder.vocab_size, device=self.device)
        self.weights = [LayerWeights(layer) for layer in target.stack.blocks]
        self.cache = self._cache(decoder)
        self.lanes = self._lanes()
        compiled: Callable = torch.compile if self.device.type == "cuda" else lambda function: function
        self.open, self.close, self.close_open = compiled(_open), compiled(_close), compiled(_close_open)
        self.choose, self.advance = compiled(choose), compiled(advance)
        self.graph: torch.cuda.CUDAGraph | None = None

    def _cache(self, decoder: DecoderConfig) -> list[tuple[Tensor, Tensor]]:
        size = (self.count, decoder.num_kv_heads, self.config.max_length, decoder.head_dim)
        dtype = self.target.embedding.dtype
        made = [torch.zeros(size, dtype=dtype, device=self.device) for _ in range(2 * decoder.num_layers)]
        return list(zip(made[::2], made[1::2], strict=True))

    def _lanes(self) -> Lanes:
        def zeros(*size: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(*size, dtype=dtype, device=self.device)

        b, length = self.count, self.config.max_length
        return Lanes(
            tokens=zeros(b, length, dtype=torch.int32),
            position=zeros(b),
            phase=zeros(b) + DONE,
            head_length=zeros(b),
            complete=zeros(b, dtype=torch.bool),
            tail=zeros(b, length, dtype=torch.int32),
            tail_length=zeros(b),
            tail_at=zeros(b),
            start=zeros(b),
            temperature=zeros(b, dtype=torch.float32),
            turn_seed=zeros(b),
            seed=zeros(b),
            row=zeros(b) - 1,
        )

    # -- one step ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _step(self) -> None:
        lanes, row = self.lanes, torch.arange(self.count, device=self.device)
        logits = self.target.logits(self.hidden(lanes.tokens[row, lanes.position].long(), lanes.position))
        in_turn = lanes.phase == TURN
        temperature = torch.where(in_turn, self.config.turn_temperature, lanes.temperature)
        seed = torch.where(in_turn, lanes.turn_seed, lanes.seed)
        log_min_p = math.log(self.config.min_p)
        chosen = self.choose(logits, streams(seed, lanes.position + 1), self.ids, temperature, log_min_p)
        token, position, phase, tail_at, start = self.advance(lanes, chosen, self.ends, self.config)
        lanes.tokens[row, position] = token
        for held, new in ((lanes.position, position), (lanes.phase, phase), (lanes.tail_at, tail_at)):
            held.copy_(new)
        lanes.start.copy_(start)

    def hidden(self, ids: Tensor, positions: Tensor) -> Tensor:
        """One token per lane at positions [B] through all layers → normed hidden [B, H]; writes keys and values."""
        stack, shape = self.target.stack, self.shape
        norms = [layer.input_norm.weight for layer in stack.blocks] + [stack.norm.weight]
        angles, scale = self.table[positions], shape.head_dim**-0.5
        residual = self.target.embed(ids)
        normed = rms_norm_torch(residual, norms[0], shape.norm_eps)
        q, k, v = self.open(normed, self.weights[0].open, angles, shape)
        for index, (weights, following) in enumerate(zip(self.weights, self.weights[1:], strict=False)):
            attended = lane_attention(q, k, v, *self.cache[index], positions, scale)
            q, k, v, residual = self.close_open(
                attended, residual, weights.close, norms[index + 1], following.open, angles, shape
            )
        attended = lane_attention(q, k, v, *self.cache[-1], positions, scale)
        return self.close(attended, residual, self.weights[-1].close, norms[-1], shape.norm_eps)[0]

    def step(self) -> None:
        """One token for every lane. On CUDA the first call captures the graph that it and all later calls replay."""
        if self.device.type != "cuda":
            self._step()
            return
        if self.graph is None:
            self.graph = self._capture()
        self.graph.replay()

    def _capture(self) -> torch.cuda.CUDAGraph:
        """The step as a graph. Lanes stand still meanwhile, so that the first part is made like all others."""
        phase = self.lanes.phase.clone()
        self.lanes.phase.fill_(DONE)
        for _ in range(3):
            self._step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        self.lanes.phase.copy_(phase)
        return graph

    # -- scripts in, conversations out --------------------------------------------------------------------------------

    def answer(self, scripts: TokenScripts, progress: Progress) -> Conversations:
        """All conversations of the scripts, in their order."""
        state, texts, start = self.lanes, [np.zeros(0, np.int32)] * len(scripts), np.zeros(len(scripts), np.int32)
        width = max(scripts.head.shape[1], scripts.tail.shape[1])
        require(width < self.config.max_length, f"generation.max_length: {self.config.max_length} is under the heads")
        state.phase.fill_(DONE)
        state.row.fill_(-1)
        shared = scripts.shared
        given = self.hand_out(torch.arange(self.count, device=self.device), scripts, 0, 0)
        while True:
            for _ in range(self.config.collect_every):
                self.step()
            done = ((state.phase == DONE) & (state.row >= 0)).nonzero().flatten()
            if len(done):
                progress(self.collect(done, texts, start))
            if given < len(scripts):
                idle = (state.phase == DONE).nonzero().flatten()
                given += self.hand_out(idle, scripts, given, max(shared - 1, 0)) if len(idle) else 0
            elif not bool((state.phase != DONE).any()):
                return assemble(scripts, texts, start, self.end_ids)

    def hand_out(self, lanes: Tensor, scripts: TokenScripts, first: int, position: int) -> int:
        """Give the lanes [n] the scripts from `first` on; how many got one. Keys before `position` are there."""
        count = min(len(lanes), len(scripts) - first)
        taken, state = lanes[:count], self.lanes
        rows = slice(first, first + count)

        def put(held: Tensor, value: np.ndarray | int) -> None:
            if isinstance(value, np.ndarray):
                held[taken] = torch.from_numpy(np.ascontiguousarray(value)).to(self.device, held.dtype)
            else:
                held[taken] = value

        for held, value in ((state.tokens, scripts.head), (state.tail, scripts.tail)):
            block = torch.from_numpy(np.ascontiguousarray(value[rows])).to(self.device)
            held[taken, : block.shape[1]] = block
        for name in ("head_length", "complete", "tail_length", "temperature", "turn_seed", "seed"):
            put(getattr(state, name), getattr(scripts, name)[rows])
        put(state.row, np.arange(first, first + count))
        for held in (state.tail_at, state.start, state.phase):
            put(held, 0)
        put(state.position, position)
        return count

    def collect(self, lanes: Tensor, texts: list[np.ndarray], start: np.ndarray) -> int:
        """Copy lanes [n] to the host, into texts and start by row; returns their answer tokens."""
        state = self.lanes
        tokens = state.tokens[lanes].cpu().numpy()
        numbers = torch.stack([state.row[lanes], state.start[lanes], state.position[lanes] + 1]).cpu().numpy()
        state.row[lanes] = -1
        for text, (row, begin, end) in zip(tokens, numbers.T.tolist(), strict=True):
            texts[row], start[row] = text[:end].copy(), begin
        return int((numbers[2] - numbers[1]).sum())
