"""Drawing y ~ P at every row without sorting the vocabulary, in Triton; see speculation/sampling.py.

Every filter keeps a beginning of the order (logit downwards, id upwards), so a row's filters come down to a cut: the
lowest logit that is kept, and the last id kept among the tokens of just that logit. `_cut_rows`, one program a row,
finds it by bisection: of all levels with count(x ≥ level) ≥ top_k, or mass(x ≥ level) ≥ top_p · total, the highest.
A logit's level is its order as an integer (for 16-bit logits, of 16 bits). Steps halve the interval of logits or, now
and then, of levels; as soon as few tokens remain above the lower bound they are copied aside and the rest of the
search reads only those. Greedy and unfiltered rows leave at once.

`_noise_tiles` then scores the kept tokens of each tile, skipping tiles that keep none or whose noise beats nothing;
`_best_of_rows` picks the highest, or the argmax for greedy rows. Sums have a fixed order, so a row's token depends on
that row alone. Weights are rounded otherwise than in torch: a token just at the edge of a filter may fall elsewhere.
At the edge top_p keeps the shortest beginning whose mass *reaches* top_p · total: r tokens of the lowest kept logit, r
the least with mass(x > level) + r · weight(level) ≥ top_p · total, by ascending id.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dscale.kernels.triton.top_logits import (
    LAST,
    LOWEST,
    as_rows,
    best_keys,
    id_of,
    key_of,
    ordered,
    unordered,
    value_of,
)
from dscale.speculation import noise

LISTED = 2048  # tokens that are copied aside
CUT_TILE = 8192
NOISE_TILE = 4096
UNUSED_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}  # low bits of a logit's float32 that are zero
TINY = tl.constexpr(1.2e-38)  # relative weight below which no noise can make a token win; not subnormal in float32
LOG2_E = tl.constexpr(1.4426950408889634)
MARGIN = tl.constexpr(1.01)  # on the noise a token needs, for rounding
GUESS = tl.constexpr(12.0)  # the first bound tried lies e¹² below the likeliest token
MASK = tl.constexpr(noise.MASK)
GOLDEN = tl.constexpr(noise.GOLDEN)
SHIFT_1, FACTOR_1 = tl.constexpr(noise.ROUNDS[0][0]), tl.constexpr(noise.ROUNDS[0][1])
SHIFT_2, FACTOR_2 = tl.constexpr(noise.ROUNDS[1][0]), tl.constexpr(noise.ROUNDS[1][1])
BELOW_ONE = tl.constexpr(noise.BELOW_ONE)
UNIT = tl.constexpr(2.0**-63)


@triton.jit
def mix(x):
    """`noise.mix` of int64."""
    x = x & MASK
    x = ((x ^ (x >> SHIFT_1)) * FACTOR_1) & MASK
    x = ((x ^ (x >> SHIFT_2)) * FACTOR_2) & MASK
    return x ^ (x >> 31)


@triton.jit
def uniform(seed, position, ids):
    """The uniform numbers behind `noise.gumbel_noise`: seed, position int64 scalars, ids integers → float32."""
    stream = mix(mix(seed) + position * GOLDEN)
    bits = mix(stream + ids.to(tl.int64) * GOLDEN)
    return tl.minimum((bits.to(tl.float32) + 0.5) * UNIT, BELOW_ONE)


@triton.jit
def gumbel(chance):
    """-log(-log1p(-u)) of uniform numbers u."""
    # -log1p(-u), exact to rounding: what 1 - u loses is made good by the quotient.
    rest = 1.0 - chance
    lost = 1.0 - rest
    waiting = tl.where(lost == 0.0, chance, -tl.log(rest) * (chance / tl.where(lost == 0.0, 1.0, lost)))
    return -tl.log(waiting)


@triton.jit
def _level_of(x, UNUSED: tl.constexpr):
    return ordered(x) >> UNUSED


@triton.jit
def _logit_of(level, UNUSED: tl.constexpr):
    code = level << UNUSED
    filled = code | ((1 << UNUSED) - 1)
    return unordered(tl.where(level < 0, filled, code))


@triton.jit
def _weight(x, top, scale):
    """Probability relative to the likeliest token, of logit `top`; scale = log2(e) / temperature."""
    return tl.exp2((x - top) * scale)


@triton.jit
def _measure(values, size, level, top, scale, floor, TILE: tl.constexpr, UNUSED: tl.constexpr):
    """Of `size` logits: how many of level ≥ `level` weigh at least floor, and their weight."""
    bound = _logit_of(level, UNUSED)
    count = tl.zeros([TILE], tl.int32)
    mass = tl.zeros([TILE], tl.float32)
    for first in range(0, size, TILE):
        at = first + tl.arange(0, TILE)
        x = tl.load(values + at, mask=at < size, other=float("-inf")).to(tl.float32)
        weight = _weight(x, top, scale)
        taken = (x >= bound) & (weight >= floor)
        count += taken.to(tl.int32)
        mass += tl.where(taken, weight, 0.0)
    return tl.sum(count, axis=0), tl.sum(mass.to(tl.float64), axis=0)


@triton.jit
def _middle(low, high, turn, top, scale, UNUSED: tl.constexpr):
    """A level strictly between low and high: a guess, then half-way between logits, every third turn between levels."""
    half = 0.5 * _logit_of(low, UNUSED) + 0.5 * _logit_of(high, UNUSED)
    guess = top - GUESS * LOG2_E / scale
    by_logit = _level_of(tl.where(turn == 0, guess, half), UNUSED)
    by_level = ((low.to(tl.int64) + high.to(tl.int64)) >> 1).to(tl.int32)
    # Levels bound the number of turns whatever the logits are; logits get there sooner as a rule.
    good = (by_logit > low) & (by_logit < high) & (turn % 3 < 2)
    return tl.where(good, by_logit, by_level)


@triton.jit
def _list(values, size, level, listed, top, scale, floor, TILE: tl.constexpr, UNUSED: tl.constexpr):
    """Copy the logits that `_measure` counts to `listed`, in order, and return their number, known to be small."""
    bound = _logit_of(level, UNUSED)
    written = tl.zeros([], tl.int32)
    for first in range(0, size, TILE):
        at = first + tl.arange(0, TILE)
        raw = tl.load(values + at, mask=at < size, other=float("-inf"))
        x = raw.to(tl.float32)
        some = ((x >= bound) & (_weight(x, top, scale) >= floor)).to(tl.int32)
        found = tl.sum(some, axis=0)
        if found > 0:
            tl.store(listed + written + tl.cumsum(some, axis=0) - some, raw, mask=some == 1)
        written += found
    tl.debug_barrier()  # the whole block reads what it wrote
    return written


@triton.jit
def _descend(
    values, size, low, high, count_low, count_high, mass_high, want, top, scale, floor,
    STOP: tl.constexpr, BY_MASS: tl.constexpr, TILE: tl.constexpr, UNUSED: tl.constexpr,
):  # fmt: skip
    """Bisect between low (enough is kept) and high (too little) until they are neighbours or few tokens remain."""
    turn = tl.zeros([], tl.int32)
    while (low + 1 < high) & (count_low > STOP):
        middle = _middle(low, high, turn, top, scale, UNUSED)
        turn += 1
        count, mass = _measure(values, size, middle, top, scale, floor, TILE, UNUSED)
        enough = mass >= want if BY_MASS else count.to(tl.float64) >= want
        low = tl.where(enough, middle, low)
        count_low = tl.where(enough, count, count_low)
        high = tl.where(enough, high, middle)
        count_high = tl.where(enough, count_high, count)
        mass_high = tl.where(enough, mass_high, mass)
    return low, high, count_low, count_high, mass_high


@triton.jit
def _search(
    values, size, listed, low, high, count_low, want, top, scale, floor,
    BY_MASS: tl.constexpr, TILE: tl.constexpr, LISTED: tl.constexpr, UNUSED: tl.constexpr,
):  # fmt: skip
    """The highest level that keeps enough; tokens of that level and above; count and mass of those above it."""
    nothing, none = tl.zeros([], tl.int32), tl.zeros([], tl.float64)
    low, high, count_low, count_high, mass_high = _descend(
        values, size, low, high, count_low, nothing, none, want, top, scale, floor,
        LISTED, BY_MASS, TILE, UNUSED,
    )  # fmt: skip
    if low + 1 < high:
        few = _list(values, size, low, listed, top, scale, floor, TILE, UNUSED)
        low, high, count_low, count_high, mass_high = _descend(
            listed, few, low, high, count_low, count_high, mass_high, want, top, scale, floor,
            -1, BY_MASS, LISTED, UNUSED,
        )  # fmt: skip
        tl.debug_barrier()  # before anything is listed anew
    return low, count_low, count_high, mass_high


@triton.jit
def _nth_of_level(values, size, level, number, TILE: tl.constexpr, UNUSED: tl.constexpr):
    """Index of the number-th (from 1) of the logits of just this level."""
    bound = _logit_of(level, UNUSED)
    seen = tl.zeros([], tl.int32)
    found = tl.full([], LAST, tl.int32)
    for first in range(0, size, TILE):
        at = first + tl.arange(0, TILE)
        x = tl.load(values + at, mask=at < size, other=float("-inf")).to(tl.float32)
        same = ((at < size) & (x == bound)).to(tl.int32)
        is_it = (same == 1) & (seen + tl.cumsum(same, axis=0) == number)
        found = tl.minimum(found, tl.min(tl.where(is_it, at, LAST), axis=0))
        seen += tl.sum(same, axis=0)
    return found


@triton.jit
def _cut_rows(
    logits, keys, temperatures, top_k, top_p, min_p, lists, levels, last_ids, stride, vocab, tiles,
    TILES: tl.constexpr, TILE: tl.constexpr, LISTED: tl.constexpr, UNUSED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    first_k, nucleus = tl.load(top_k + row), tl.load(top_p + row)
    bottom = _level_of(tl.full([], float("-inf"), tl.float32), UNUSED)
    level = bottom
    last = tl.full([], LAST, tl.int32)
    if (temperature > 0) & ((first_k > 0) | (nucleus < 1)):
        values = logits + row * stride
        listed = lists + row * LISTED
        part = tl.arange(0, TILES)
        best = tl.max(tl.load(keys + row * tiles + part, mask=part < tiles, other=LOWEST), axis=0)
        top = value_of(best)
        scale = LOG2_E / temperature
        floor = tl.maximum(tl.load(min_p + row), TINY)
        # Everything below this logit weighs less than the floor, with a margin for rounding.
        lowest = top + (tl.log(floor) - 1.0) * temperature
        low = tl.maximum(_level_of(lowest, UNUSED) - 1, bottom)
        high = _level_of(top, UNUSED) + 1
        count, total = _measure(values, vocab, low, top, scale, floor, TILE, UNUSED)
        number = tl.full([], LAST, tl.int32)  # how many tokens of the level `level` are kept
        same = tl.zeros([], tl.int32)  # how many there are
        if (first_k > 0) & (first_k < count):
            want = first_k.to(tl.float64)
            level, count, above, mass = _search(
                values, vocab, listed, low, high, count, want, top, scale, floor, False, TILE, LISTED, UNUSED
            )
            number, same = first_k.to(tl.int32) - above, count - above
            weight = _weight(_logit_of(level, UNUSED), top, scale)
            total = mass + number.to(tl.float64) * weight.to(tl.float64)
            low = level
        if nucleus < 1:
            want = nucleus.to(tl.float64) * total
            found, count, above, mass = _search(
                values, vocab, listed, low, high, count, want, top, scale, floor, True, TILE, LISTED, UNUSED
            )
            weight = _weight(_logit_of(found, UNUSED), top, scale)
            needed = tl.ceil((want - mass) / weight.to(tl.float64))
            fitting = tl.maximum(tl.minimum(needed, (count - above).to(tl.float64)), 1.0).to(tl.int32)
            number = tl.where(found == level, tl.minimum(number, fitting), fitting)
            same = count - above
            level = found
        if number < same:
            last = _nth_of_level(values, vocab, level, number, TILE, UNUSED)
    tl.store(levels + row, level)
    tl.store(last_ids + row, last)


@triton.jit
def _noise_tiles(
    logits, keys, temperatures, top_k, top_p, min_p, seeds, positions, levels, last_ids, best, stride, vocab, tiles,
    noisy, TILES: tl.constexpr, TILE: tl.constexpr, UNUSED: tl.constexpr,
):  # fmt: skip
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperatures + row)
    if temperature > 0:
        ids = tile * TILE + tl.arange(0, TILE)
        x = tl.load(logits + row * stride + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
        part = tl.arange(0, TILES)
        first = tl.max(tl.load(keys + row * tiles + part, mask=part < tiles, other=LOWEST), axis=0)
        top, scale = value_of(first), LOG2_E / temperature
        kept = ids < vocab
        share = tl.load(min_p + row)
        if (tl.load(top_k + row) > 0) | (tl.load(top_p + row) < 1) | (share > 0):
            bound = _logit_of(tl.load(levels + row), UNUSED)
            kept &= (_weight(x, top, scale) >= tl.maximum(share, TINY)) & (x >= bound)
            kept &= (x > bound) | (ids <= tl.load(last_ids + row))
        found = tl.full([], LOWEST, tl.int64)
        if tl.max(kept.to(tl.int32), axis=0) == 1:
            seed, position = tl.load(seeds + row), tl.load(positions + row)
            chance = uniform(seed, position, ids)
            # Beating the likeliest token, which is always kept, takes u < -log1p(-u) < e^(x - top - its noise).
            lead = gumbel(uniform(seed, position, id_of(first))) * LOG2_E
            kept &= chance <= MARGIN * tl.exp2((x - top) * scale - lead)
            if tl.max(kept.to(tl.int32), axis=0) == 1:
                scores = tl.div_rn(x, temperature) + gumbel(chance)
                found = tl.max(tl.where(kept, key_of(scores, ids), LOWEST), axis=0)
        tl.store(best + row * noisy + tile, found)


@triton.jit
def _best_of_rows(keys, best, temperatures, out, vocab, tiles, noisy, TILES: tl.constexpr, NOISY: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, TILES)
    greedy = tl.max(tl.load(keys + row * tiles + part, mask=part < tiles, other=LOWEST), axis=0)
    tile = tl.arange(0, NOISY)
    drawn = tl.full([], LOWEST, tl.int64)
    if tl.load(temperatures + row) > 0:
        drawn = tl.max(tl.load(best + row * noisy + tile, mask=tile < noisy, other=LOWEST), axis=0)
    # A row whose logits are all NaN or -inf keeps nothing: its argmax stands, and is clamped to a valid id.
    chosen = tl.where(drawn > LOWEST, drawn, greedy)
    tl.store(out + row, tl.minimum(id_of(chosen), vocab - 1).to(tl.int64))


@triton.jit
def _row_params(
    lanes, lane_of_row, positions, temperature, top_k, top_p, min_p, seed,
    temperature_out, top_k_out, top_p_out, min_p_out, seed_out, position_out, rows, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    lane = tl.load(lane_of_row + row, mask=inside, other=0)
    owner = tl.load(lanes + lane, mask=inside, other=0)
    tl.store(temperature_out + row, tl.load(temperature + owner, mask=inside, other=0.0), mask=inside)
    tl.store(top_k_out + row, tl.load(top_k + owner, mask=inside, other=0), mask=inside)
    tl.store(top_p_out + row, tl.load(top_p + owner, mask=inside, other=0.0), mask=inside)
    tl.store(min_p_out + row, tl.load(min_p + owner, mask=inside, other=0.0), mask=inside)
    tl.store(seed_out + row, tl.load(seed + owner, mask=inside, other=0), mask=inside)
    tl.store(position_out + row, tl.load(positions + row, mask=inside, other=0) + 1, mask=inside)


def row_params(
    lanes: Tensor,
    lane_of_row: Tensor,
    positions: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The fields of RowParams for rows [M], from columns of the state: see DeviceState.row_params."""
    rows = lane_of_row.shape[0]
    floats = torch.empty(3, rows, dtype=torch.float32, device=lanes.device).unbind()
    integers = torch.empty(3, rows, dtype=torch.int64, device=lanes.device).unbind()
    out = (floats[0], integers[0], floats[1], floats[2], integers[1], integers[2])
    if rows > 0:
        _row_params[(triton.cdiv(rows, 128),)](
            lanes, lane_of_row, positions, temperature, top_k, top_p, min_p, seed, *out, rows, BLOCK=128, num_warps=4
        )
    return out


def cuts(
    logits: Tensor, keys: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> tuple[Tensor, Tensor]:
    """Where top_k and top_p cut rows of logits [M, V]: levels [M], and the last id [M] kept at just that level, int32.

    keys [M, tiles] as `best_keys` gives them; the parameters are the fields of RowParams, contiguous.
    """
    rows, tiles = keys.shape
    lists = torch.empty(rows, LISTED, dtype=logits.dtype, device=logits.device)
    levels, last_ids = torch.empty(2, rows, dtype=torch.int32, device=logits.device).unbind()
    _cut_rows[(rows,)](
        logits, keys, temperature, top_k, top_p, min_p, lists, levels, last_ids, logits.stride(0), logits.shape[1],
        tiles, TILES=int(triton.next_power_of_2(tiles)), TILE=CUT_TILE, LISTED=LISTED,
        UNUSED=UNUSED_BITS[logits.dtype], num_warps=16,
    )  # fmt: skip
    return levels, last_ids


def draw(logits: Tensor, columns: dict[str, Tensor]) -> Tensor:
    """See `draw` in speculation/sampling.py: logits [M, V] → tokens [M] int64.

    columns: the fields of RowParams, one tensor [M] each, of the dtypes named there.
    """
    logits = as_rows(logits)
    rows, vocab = logits.shape
    keys, device, unused = best_keys(logits), logits.device, UNUSED_BITS[logits.dtype]
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    if rows == 0:
        return tokens
    tiles, noisy = keys.shape[1], int(triton.cdiv(vocab, NOISE_TILE))
    padded = int(triton.next_power_of_2(tiles))
    best = torch.empty(rows, noisy, dtype=torch.int64, device=device)
    own = {name: column.contiguous() for name, column in columns.items()}
    filters = (own["temperature"], own["top_k"], own["top_p"], own["min_p"])
    levels, last_ids = cuts(logits, keys, *filters)
    _noise_tiles[(rows, noisy)](
        logits, keys, *filters, own["seed"], own["position"], levels, last_ids, best, logits.stride(0), vocab, tiles,
        noisy, TILES=padded, TILE=NOISE_TILE, UNUSED=unused, num_warps=8,
    )  # fmt: skip
    _best_of_rows[(rows,)](
        keys, best, own["temperature"], tokens, vocab, tiles, noisy,
        TILES=padded, NOISY=int(triton.next_power_of_2(noisy)), num_warps=1,
    )  # fmt: skip
    return tokens


def serves(logits: Tensor) -> bool:
    """True for the dtypes that `draw` takes."""
    return logits.dtype in UNUSED_BITS
