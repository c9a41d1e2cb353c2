"""Triton attention over the paged cache: one tile for verification, draft blocks and prefill.

A program takes P query heads of one KV head (P = heads/kv when packed, 1 in the paper's layouts) and a tile of rows
r = token · P + head, so a page is read once for all of them. For a range of keys [b, e) it keeps, in base 2,
    m = max s,   l = Σ 2^(s - m),   a = Σ 2^(s - m) · v          with s = scale · log2(e) · q·k
and two ranges merge as  m = max(m₁, m₂),  l = Σᵢ lᵢ 2^(mᵢ - m),  a = Σᵢ aᵢ 2^(mᵢ - m);  out = a / l.

Verification and draft blocks: contexts are split so that lanes × KV heads × pieces fill the chip. Every program works
out its part from starts and contexts in device memory, so a captured graph fits any lengths: where nearly equal chunks
go round, one each; where they do not, an equal share of all keys in one line, as decomposing a product by its inner
turns does (Osama et al. 2023, Stream-K). The last program to finish a row tile merges its pieces, in their order: the
result does not depend on who was last.
Prefill: one program a tile, no chunks.
Deterministic: chunks end at multiples of a fixed number of keys from position 0, tiles have one shape, and prefill
merges the same chunks in the same order, so the bits of a row depend on its own keys alone.
"""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import triton
import triton.language as tl

EMPTY = tl.constexpr(-1.0e30)  # the m of no keys: finite, so 2^(m - m) is 1 and 2^(-inf - m) is 0


@triton.jit
def _pages(table, begin, newest, PAGE: tl.constexpr, KEYS: tl.constexpr):
    """Pages of keys begin … begin+KEYS-1."""
    return tl.load(table + tl.minimum(begin + tl.arange(0, KEYS), newest) // PAGE)


@triton.jit
def _attend(
    q, page, table, keys, values, begin, end, newest, position, last, scale, window,
    KV: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """(m, l, a) of rows q [rows, D] over keys begin … end-1. keys, values point at a KV head's first page; page holds
    the pages of the first KEYS keys (_pages).

    Past the newest key the newest is read again and masked: only rows that were written are ever read.
    """
    top = tl.full([q.shape[0]], EMPTY, tl.float32)
    total = tl.zeros([q.shape[0]], tl.float32)
    mixed = tl.zeros([q.shape[0], D], tl.float32)
    column = tl.arange(0, KEYS)
    element = tl.arange(0, D)
    oldest = position - window
    for start in range(begin, end, KEYS):
        key = start + column
        offset = page.to(tl.int64) * (KV * PAGE * D) + (tl.minimum(key, newest) % PAGE) * D
        k = tl.load(keys + offset[:, None] + element[None, :])
        v = tl.load(values + offset[:, None] + element[None, :])
        page = _pages(table, start + KEYS, newest, PAGE, KEYS)  # of the next turn: no load waits for a load
        score = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
        seen = key[None, :] <= last[:, None]
        if WINDOW:
            seen = seen & (key[None, :] > oldest[:, None])
        score = tl.where(seen, score, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, 1) * scale)
        weight = tl.exp2(tl.fma(score, scale, -new_top[:, None]))
        kept = tl.exp2(top - new_top)
        total = tl.fma(total, kept, tl.sum(weight, 1))
        mixed = tl.dot(weight.to(q.dtype), v.to(q.dtype), mixed * kept[:, None], input_precision="ieee")
        top = new_top
    return top, total, mixed


@triton.jit
def _merge(top, total, mixed, top2, total2, mixed2):
    """(m, l, a) of two ranges of keys together. The rounding is spelled out: both kernels merge to the same bits."""
    both = tl.maximum(top, top2)
    one, two = tl.exp2(top - both), tl.exp2(top2 - both)
    return both, tl.fma(total2, two, total * one), tl.fma(mixed2, two[:, None], mixed * one[:, None])


@triton.jit
def _query(at, live, keys):
    """Rows of q at these pointers. Over keys in eight bits bfloat16 becomes float16, in which eight bits are one
    instruction away and weights keep three bits more; what it gives up is below 2^-24 and beyond 65504."""
    query = tl.load(at, live[:, None], 0.0)
    if keys.dtype.element_ty == tl.float8e4nv and query.dtype == tl.bfloat16:
        query = tl.clamp(query.to(tl.float32), -65504.0, 65504.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float16)
    return query


@triton.jit
def _rows(first, count, context, CAUSAL: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr):
    """Of a tile's rows: token in the lane, head in the group, whether it exists, its position, the last key it sees."""
    row = first + tl.arange(0, ROWS)
    token = row // P
    live = token < count
    position = context + token
    last = position if CAUSAL else tl.zeros_like(position) + (context + count - 1)
    return token, row % P, live, position, tl.where(live, last, -1)


@triton.jit
def _end(first, count, context, CAUSAL: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr):
    """One past the last key that any row of the tile sees."""
    if CAUSAL:
        return context + tl.minimum((first + ROWS - 1) // P + 1, count)
    return context + count


@triton.jit
def _first_tile(context, window, KEYS: tl.constexpr, FIXED: tl.constexpr, WINDOW: tl.constexpr):
    """Key tile of the first key that a lane's rows may see; of its chunk, where chunks are fixed."""
    tile = tl.maximum(context - window + 1, 0) // KEYS if WINDOW else tl.zeros_like(context)
    return tile // FIXED * FIXED if FIXED > 0 else tile


@triton.jit
def _last_tile(context, count, KEYS: tl.constexpr):
    """One past the key tile of a lane's newest key."""
    return tl.cdiv(context + count, KEYS)


@triton.jit
def _store(out, at, live, total, mixed, value_scale, D: tl.constexpr):
    result = mixed * (value_scale / tl.where(total > 0, total, 1.0))[:, None]
    element = tl.arange(0, D)
    tl.store(out + at[:, None] + element[None, :], result.to(out.dtype.element_ty), mask=live[:, None])


@triton.jit
def _clear(out, first, rows, step, HEADS: tl.constexpr, D: tl.constexpr):
    """Zero the sentinel rows first, first + step, … of out [rows, HEADS, D]."""
    for row in range(first, rows, step):
        for head in range(HEADS):
            tl.store(out + (row * HEADS + head) * D + tl.arange(0, D), tl.zeros([D], out.dtype.element_ty))


@triton.jit
def _keep(partial, stats, slot, top, total, mixed, ROWS: tl.constexpr, D: tl.constexpr):
    """Leave (m, l, a) of a piece in its slot."""
    row = tl.arange(0, ROWS)
    wide = row.to(tl.int64)  # partial may have more than 2^31 elements
    tl.store(partial + (slot * ROWS + wide)[:, None] * D + tl.arange(0, D)[None, :], mixed)
    tl.store(stats + slot * (2 * ROWS) + row, top)
    tl.store(stats + slot * (2 * ROWS) + ROWS + row, total)


@triton.jit
def _merge_pieces(partial, stats, pieces, first_slot, later, step, ROWS: tl.constexpr, D: tl.constexpr):
    """(l, a) of a unit from its pieces in their order: the first one's slot, then later + step, later + 2 · step, …"""
    AHEAD: tl.constexpr = 3 if ROWS * D <= 128 * 128 else 1  # loads on their way: what fits into shared memory
    row = tl.arange(0, ROWS)
    wide = row.to(tl.int64)
    top = tl.full([ROWS], EMPTY, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, D], tl.float32)
    for piece in tl.range(0, pieces, num_stages=AHEAD):
        slot = tl.where(piece == 0, first_slot, later + piece * step)
        top2 = tl.load(stats + slot * (2 * ROWS) + row, cache_modifier=".cg")
        total2 = tl.load(stats + slot * (2 * ROWS) + ROWS + row, cache_modifier=".cg")
        there = (slot * ROWS + wide)[:, None] * D + tl.arange(0, D)[None, :]
        mixed2 = tl.load(partial + there, cache_modifier=".cg")
        top, total, mixed = _merge(top, total, mixed, top2, total2, mixed2)
    return total, mixed


@triton.jit
def _lane_at(place, through, work, lane_range):
    """The lane whose work is at a place of all lanes' work in a line, and where its work begins."""
    lane = tl.sum((through <= place).to(tl.int32))
    return lane, tl.sum(tl.where(lane_range == lane, through - work, 0))


@triton.jit
def _snap(place, total, through, work, tiles, lane_range, LEAST: tl.constexpr):
    """A bound of the line of work, moved to the nearer end of its unit where it would cut off under LEAST key tiles."""
    lane, base = _lane_at(place, through, work, lane_range)
    size = tl.maximum(tl.sum(tl.where(lane_range == lane, tiles, 0)), 1)
    inside = (place - base) % size
    moved = tl.where(inside < LEAST, place - inside, tl.where(size - inside < LEAST, place - inside + size, place))
    return tl.where(place < total, moved, total)


@triton.jit
def _chunk_length(tiles, units, quota, programs, SLACK: tl.constexpr):
    """The least of SLACK lengths from quota on, in sixteenths of it, at which there is at most a chunk a program; the
    largest where there is none."""
    lengths = quota + tl.arange(0, SLACK) * tl.maximum(quota // 16, 1)
    chunks = tl.sum(tl.cdiv(tiles[:, None], lengths[None, :]) * units[:, None], 0)
    return tl.min(tl.where(chunks <= programs, lengths, tl.max(lengths)))


@triton.jit(do_not_specialize=["rows", "lane_count"])
def decode_kernel(
    q, keys, values, out, table, lanes, starts, contexts, partial, stats, arrivals,
    rows, lane_count, table_stride, q_row, q_head, scale, window, key_scale, value_scale,
    KV: tl.constexpr, GROUP: tl.constexpr, P: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr,
    ROWS: tl.constexpr, TILES: tl.constexpr, KEYS: tl.constexpr, LANES: tl.constexpr, FIXED: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SLACK: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """Few rows a lane, keys split over the chip. FIXED: keys tiles of a chunk (deterministic), or 0: balanced.

    A unit is a row tile of a head of a lane; its work are the key tiles from `origin` to `final`. Balanced:
    - whole units, a program takes every programs-th, if that is within a quarter of the ideal: nothing is merged;
    - chunks of one length, if that gives at most a chunk a program and is not much over the ideal (_chunk_length);
    - else all key tiles of all units stand in one line, of which each program takes `quota` tiles: perhaps the end of
      one unit, whole ones, and the beginning of another.
    A unit in several pieces is merged by whoever ends last. partial [slots, ROWS, D] and stats [slots, 2, ROWS]
    float32, slots ≥ 2 · programs (FIXED: chunks); arrivals [lanes · TILES · heads] int32, zero at the start and at the
    end.
    """
    HEADS: tl.constexpr = KV * GROUP // P
    program, programs = tl.program_id(0), tl.num_programs(0)
    lane_range = tl.arange(0, LANES)
    exists = lane_range < lane_count
    firsts = tl.load(starts + lane_range, exists, 0).to(tl.int32)
    counts = tl.load(starts + lane_range + 1, exists, 0).to(tl.int32) - firsts
    before = tl.load(contexts + lane_range, exists, 0).to(tl.int32)
    units = HEADS * tl.cdiv(counts * P, ROWS)
    tiles = _last_tile(before, counts, KEYS) - _first_tile(before, window, KEYS, FIXED, WINDOW)
    tiles = tl.where(counts > 0, tiles, 0)
    quota = tl.maximum(tl.cdiv(tl.sum(tiles * units), programs), LEAST)
    longest = tl.maximum(tl.max(tiles), 1)
    whole = tl.cdiv(tl.sum(tl.where(tiles > 0, units, 0)), programs) * longest <= quota + quota // 4
    length = FIXED if FIXED > 0 else tl.where(whole, longest, _chunk_length(tiles, units, quota, programs, SLACK))
    work = tl.cdiv(tiles, length) * units
    in_line = (tl.sum(work) > programs) & (FIXED == 0) & (length < longest)
    work = tl.where(in_line, tiles * units, work)
    total, through = tl.sum(work), tl.cumsum(work, 0)
    at, stop = program, total
    if in_line:
        at = _snap(tl.minimum(program * quota, total), total, through, work, tiles, lane_range, LEAST)
        stop = _snap(tl.minimum((program + 1) * quota, total), total, through, work, tiles, lane_range, LEAST)

    while at < stop:
        lane, base = _lane_at(at, through, work, lane_range)
        start = tl.load(starts + lane).to(tl.int32)
        count = tl.load(starts + lane + 1).to(tl.int32) - start
        context = tl.load(contexts + lane).to(tl.int32)
        pages = table + tl.load(lanes + lane) * table_stride
        lane_units = HEADS * tl.cdiv(count * P, ROWS)
        origin = _first_tile(context, window, KEYS, FIXED, WINDOW)
        size = _last_tile(context, count, KEYS) - origin
        if in_line:
            unit, turn = (at - base) // size, (at - base) % size
            opened = at - turn
            upto = tl.minimum(stop - opened, size)
            owner = tl.cdiv(opened + LEAST, quota) - 1  # the program of the unit's first piece
            pieces = tl.maximum((opened + size - LEAST) // quota - owner, 0) + 1
            slot = tl.where(turn == 0, programs + program, program)  # a program begins one unit and ends one, at most
            first_slot, later, step = programs + owner, owner, 1
            at = opened + upto
        else:
            unit = (at - base) % lane_units
            each = length if FIXED > 0 else tl.cdiv(size, tl.cdiv(size, length))
            turn = (at - base) // lane_units * each
            upto = tl.minimum(turn + each, size)
            pieces = tl.cdiv(size, each)
            slot, first_slot, later, step = at, base + unit, base + unit, lane_units
            at += programs
        head, tile = unit % HEADS, unit // HEADS

        token, member, live, position, last = _rows(tile * ROWS, count, context, CAUSAL, P, ROWS)
        kv = head * P // GROUP
        begin = (origin + turn) * KEYS
        end = tl.minimum((origin + upto) * KEYS, _end(tile * ROWS, count, context, CAUSAL, P, ROWS))
        page = _pages(pages, begin, context + count - 1, PAGE, KEYS)
        element = tl.arange(0, D)
        place = (start + token) * q_row + (head * P + member) * q_head
        query = _query(q + place[:, None] + element[None, :], live, keys)
        top, total_weight, mixed = _attend(
            query, page, pages, keys + kv * PAGE * D, values + kv * PAGE * D, begin, end, context + count - 1,
            position, last, scale * key_scale, window, KV, PAGE, D, KEYS, WINDOW,
        )  # fmt: skip
        to = ((start + token) * (KV * GROUP) + head * P + member) * D
        if pieces == 1:
            _store(out, to, live, total_weight, mixed, value_scale, D)
        else:
            _keep(partial, stats, slot, top, total_weight, mixed, ROWS, D)
            tl.debug_barrier()  # all threads' stores come before the arrival
            arrival = arrivals + (lane * TILES + tile) * HEADS + head
            if tl.atomic_add(arrival, 1, sem="acq_rel") == pieces - 1:
                tl.debug_barrier()
                total_weight, mixed = _merge_pieces(partial, stats, pieces, first_slot, later, step, ROWS, D)
                _store(out, to, live, total_weight, mixed, value_scale, D)
                tl.store(arrival, 0)
    _clear(out, tl.load(starts + lane_count).to(tl.int32) + program, rows, programs, KV * GROUP, D)


@triton.jit(do_not_specialize=["rows", "lane_count"])
def prefill_kernel(
    q, keys, values, out, table, lanes, starts, contexts,
    rows, lane_count, table_stride, q_row, q_head, scale, window, key_scale, value_scale,
    KV: tl.constexpr, GROUP: tl.constexpr, P: tl.constexpr, PAGE: tl.constexpr, D: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, FIXED: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """Many rows a lane: program (tile, head, lane) attends over all keys its rows see, longest tiles first."""
    HEADS: tl.constexpr = KV * GROUP // P
    head, lane = tl.program_id(1), tl.program_id(2)
    start = tl.load(starts + lane).to(tl.int32)
    count = tl.load(starts + lane + 1).to(tl.int32) - start
    context = tl.load(contexts + lane).to(tl.int32)
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS
    if first < count * P:
        token, member, live, position, last = _rows(first, count, context, CAUSAL, P, ROWS)
        kv = head * P // GROUP
        end = _end(first, count, context, CAUSAL, P, ROWS)
        begin = tl.maximum(context + first // P - window + 1, 0) // KEYS * KEYS if WINDOW else 0
        newest = context + count - 1
        pages = table + tl.load(lanes + lane) * table_stride
        place = (start + token).to(tl.int64) * q_row + (head * P + member) * q_head
        query = _query(q + place[:, None] + tl.arange(0, D)[None, :], live, keys)
        keys += kv * PAGE * D
        values += kv * PAGE * D
        scale *= key_scale
        if FIXED > 0:
            top = tl.full([ROWS], EMPTY, tl.float32)
            total = tl.zeros([ROWS], tl.float32)
            mixed = tl.zeros([ROWS, D], tl.float32)
            for chunk in range(begin // (FIXED * KEYS) * (FIXED * KEYS), end, FIXED * KEYS):
                page = _pages(pages, chunk, newest, PAGE, KEYS)
                chunk_end = tl.minimum(chunk + FIXED * KEYS, end)
                top2, total2, mixed2 = _attend(
                    query, page, pages, keys, values, chunk, chunk_end, newest, position, last, scale, window,
                    KV, PAGE, D, KEYS, WINDOW,
                )  # fmt: skip
                top, total, mixed = _merge(top, total, mixed, top2, total2, mixed2)
        else:
            page = _pages(pages, begin, newest, PAGE, KEYS)
            top, total, mixed = _attend(
                query, page, pages, keys, values, begin, end, newest, position, last, scale, window,
                KV, PAGE, D, KEYS, WINDOW,
            )  # fmt: skip
        at = ((start + token).to(tl.int64) * (KV * GROUP) + head * P + member) * D
        _store(out, at, live, total, mixed, value_scale, D)
    programs = tl.num_programs(0) * HEADS * lane_count
    program = (lane * HEADS + head) * tl.num_programs(0) + tl.program_id(0)
    _clear(out, tl.load(starts + lane_count).to(tl.int32) + program, rows, programs, KV * GROUP, D)
