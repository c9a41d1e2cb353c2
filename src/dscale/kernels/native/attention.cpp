// Attention of ragged rows over a paged cache; semantics in kernels/attention.py.
//
// One item of work = some rows of one request and all query heads of one key head ("queries"), so that a page is read
// once for all of them. The context is cut at multiples of `chunk` tokens. A chunk's keys and values are widened to
// float32 panels; every query gets scores, softmax numerator and weighted values of the chunk on its own; chunks are then
// joined in order. Long contexts with few items hand out single chunks and join them in a second pass, by the same
// arithmetic: a row's result depends neither on the batch nor on the number of threads.
#include <vector>

#include "tile.h"

namespace dscale {
namespace {

constexpr long chunk = 256;     // tokens; part of the order of summation
constexpr long queries_max = 64;  // of an item, unless one row has more

struct Problem {
    long heads, kv, size;  // size: of one head
    long page_size, page_stride, table_stride;
    float scale;
    bool causal;
    long window;  // 0: none
    const int32_t* table;
    const int64_t *lanes, *starts, *contexts;

    long group() const { return heads / kv; }
    long padded() const { return divide_up(size, panel_columns) * panel_columns; }
};

struct Item {
    long lane, first, rows, kv_head;  // first: row within the lane
    long begin, end;                  // chunks
};

struct Span {
    long begin, end;  // tokens
};

Span visible(const Problem& p, long lane, long row) {
    const long position = p.contexts[lane] + row;
    const long count = p.starts[lane + 1] - p.starts[lane];
    const long end = p.causal ? position + 1 : p.contexts[lane] + count;
    return {p.window ? std::max(0L, position - p.window + 1) : 0, end};
}

// Everything one thread needs, kept between calls.
struct Scratch {
    std::vector<float> memory;

    float* take(size_t floats) {
        if (memory.size() < floats + 16) memory.resize(floats + 16);
        return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) & ~uintptr_t(63));
    }
};

// Softmax state of queries: peak and total of each, and values [queries][padded] not yet divided by the total.
struct State {
    float *peaks, *totals, *values;
    long padded;

    static size_t floats(long queries, long padded) { return size_t(queries) * (padded + 2); }
    State(float* memory, long queries, long padded)
        : peaks(memory), totals(memory + queries), values(memory + 2 * queries), padded(padded) {}

    void clear(long queries) {
        std::fill(peaks, peaks + queries, -INFINITY);
        std::fill(totals, totals + queries, 0.0f);
        std::fill(values, values + queries * padded, 0.0f);
    }

    // Add one query's later chunk.
    void join(long query, float peak, float total, const float* chunk_values) {
        float* mine = values + query * padded;
        if (total == 0.0f) return;
        if (totals[query] == 0.0f) {
            peaks[query] = peak, totals[query] = total;
            std::memcpy(mine, chunk_values, padded * sizeof(float));
            return;
        }
        const float highest = std::max(peaks[query], peak);
        const float keep = exponential(fill(peaks[query] - highest))[0], enter = exponential(fill(peak - highest))[0];
        for (long i = 0; i < padded; i += lanes)
            store(mine + i, load(mine + i) * keep + load(chunk_values + i) * enter);
        peaks[query] = highest;
        totals[query] = totals[query] * keep + total * enter;
    }
};

#if defined(__AVX512F__)
DSCALE_INLINE __m512 load16(const float* p) { return _mm512_loadu_ps(p); }
DSCALE_INLINE __m512 load16(const bfloat16* p) { return (__m512)load(p); }

// 16 keys of 16 elements → 16 rows of a key panel.
template <class T>
DSCALE_INLINE void transpose16(const T* keys, long stride, float* out) {
    __m512 a[16], b[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) a[i] = load16(keys + i * stride);
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        b[2 * i] = _mm512_unpacklo_ps(a[2 * i], a[2 * i + 1]);
        b[2 * i + 1] = _mm512_unpackhi_ps(a[2 * i], a[2 * i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        const __m512 *c = b + 4 * i;
        a[4 * i] = _mm512_shuffle_ps(c[0], c[2], 0x44);
        a[4 * i + 1] = _mm512_shuffle_ps(c[0], c[2], 0xee);
        a[4 * i + 2] = _mm512_shuffle_ps(c[1], c[3], 0x44);
        a[4 * i + 3] = _mm512_shuffle_ps(c[1], c[3], 0xee);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        b[i] = _mm512_shuffle_f32x4(a[i], a[4 + i], 0x88);
        b[4 + i] = _mm512_shuffle_f32x4(a[i], a[4 + i], 0xdd);
        b[8 + i] = _mm512_shuffle_f32x4(a[8 + i], a[12 + i], 0x88);
        b[12 + i] = _mm512_shuffle_f32x4(a[8 + i], a[12 + i], 0xdd);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        _mm512_store_ps(out + i * panel_columns, _mm512_shuffle_f32x4(b[i], b[8 + i], 0x88));
        _mm512_store_ps(out + (8 + i) * panel_columns, _mm512_shuffle_f32x4(b[i], b[8 + i], 0xdd));
        _mm512_store_ps(out + (4 + i) * panel_columns, _mm512_shuffle_f32x4(b[4 + i], b[12 + i], 0x88));
        _mm512_store_ps(out + (12 + i) * panel_columns, _mm512_shuffle_f32x4(b[4 + i], b[12 + i], 0xdd));
    }
}
#endif

// count keys [size] of one page → columns `column` … of key panels [token panels][size][columns]. A whole page of 16 is
// read even where only some of its keys are wanted: what the others hold is masked later.
template <class T>
void widen_keys(const T* keys, long count, long column, long size, long page_size, float* panels) {
    long done = 0;
#if defined(__AVX512F__)
    if (page_size == 16) {
        keys -= column % 16 * size, count += column % 16, column -= column % 16;
        float* out = panels + column / panel_columns * size * panel_columns + column % panel_columns;
        for (; done + 16 <= size; done += 16) transpose16(keys + done, size, out + done * panel_columns);
        if (done == size) return;
    }
#else
    (void)page_size;
#endif
    for (long t = 0; t < count; t++) {
        float* out = panels + (column + t) / panel_columns * size * panel_columns + (column + t) % panel_columns;
        for (long i = done; i < size; i++) out[i * panel_columns] = scalar(keys[t * size + i]);
    }
}

// count values [size] of one page → rows `row` … of value panels [padded / columns][chunk][columns].
template <class T>
void widen_values(const T* values, long count, long row, long size, float* panels) {
    for (long t = 0; t < count; t++)
        for (long i = 0; i < size; i += panel_columns) {
            float* out = panels + (i * chunk) + (row + t) * panel_columns;
            store(out, load_upto(values + t * size + i, size - i));
            const long left = size - i - lanes;
            store(out + lanes, left > 0 ? load_upto(values + t * size + i + lanes, left) : Floats{});
        }
}

template <class T>
void widen_chunk(const Problem& p, const T* keys, const T* values, const Item& item, Span tokens, float* key_panels,
                 float* value_panels) {
    const int32_t* pages = p.table + p.lanes[item.lane] * p.table_stride;
    const long base = tokens.begin / chunk * chunk;
    for (long token = tokens.begin; token < tokens.end;) {
        const long offset = token % p.page_size;
        const long count = std::min(p.page_size - offset, tokens.end - token);
        const long at = pages[token / p.page_size] * p.page_stride + (item.kv_head * p.page_size + offset) * p.size;
        widen_keys(keys + at, count, token - base, p.size, p.page_size, key_panels);
        widen_values(values + at, count, token - base, p.size, value_panels);
        token += count;
    }
}

struct Panels {
    const float *x, *panels;
    float* out;
    long x_stride, out_stride, depth, panel_stride, first, last;  // panels first … last - 1

    template <int R>
    void run() const {
        for (long i = first; i < last; i++) {
            Accumulators<R> sums = {};
            multiply<R>(sums, x, x_stride, panels + i * panel_stride, depth, nullptr);
            for (int r = 0; r < R; r++) {
                store(out + r * out_stride + i * panel_columns, sums[r][0]);
                store(out + r * out_stride + i * panel_columns + lanes, sums[r][1]);
            }
        }
    }
};

// Scores [chunk] → numerators e^(scale · score - peak) within the span (relative to the chunk), zeros around it.
void numerators(float* scores, Span span, Span computed, float scale, float* peak, float* total) {
    Floats highest = fill(-INFINITY);
    const long first = computed.begin / lanes * lanes;
    Words column;
    for (int i = 0; i < lanes; i++) column[i] = uint32_t(first + i);
    const Words begin = Words{} + uint32_t(span.begin), width = Words{} + uint32_t(span.end - span.begin);
    Words at = column;
    for (long i = first; i < computed.end; i += lanes, at += uint32_t(lanes)) {
        const Floats score = (at - begin) < width ? load(scores + i) * scale : fill(-INFINITY);
        store(scores + i, score);
        highest = maximum(highest, score);
    }
    *peak = largest(highest);
    Floats sums = {};
    at = column;
    for (long i = first; i < computed.end; i += lanes, at += uint32_t(lanes)) {
        const Floats e = (at - begin) < width ? exponential(load(scores + i) - *peak) : Floats{};
        store(scores + i, e);
        sums += e;
    }
    *total = sum(sums);
}

struct Buffers {
    float *queries, *keys, *values, *scores, *block;
    State state;

    static size_t floats(long queries, long size, long padded) {
        return queries * size + chunk * (size + padded) + tile_rows * (chunk + padded) + State::floats(queries, padded) + 256;
    }
    Buffers(float* memory, long queries_count, long size, long padded)
        : queries(aligned(memory, queries_count * size)), keys(aligned(memory, chunk * size)),
          values(aligned(memory, chunk * padded)), scores(aligned(memory, tile_rows * chunk)),
          block(aligned(memory, tile_rows * padded)),
          state(aligned(memory, State::floats(queries_count, padded)), queries_count, padded) {}

    static float* aligned(float*& memory, long floats) {
        float* mine = memory;
        memory += divide_up(floats, 16) * 16;
        return mine;
    }
};

// One chunk of tokens for all queries of an item, joined to buffers.state.
template <class T>
void attend_chunk(const Problem& p, const T* keys, const T* values, const Item& item, long index, Buffers& buffers) {
    const long group = p.group(), queries = item.rows * group, padded = p.padded(), base = index * chunk;
    const Span first = visible(p, item.lane, item.first), last = visible(p, item.lane, item.first + item.rows - 1);
    const Span tokens{std::max(first.begin, base), std::min(last.end, base + chunk)};
    if (tokens.begin >= tokens.end) return;
    widen_chunk(p, keys, values, item, tokens, buffers.keys, buffers.values);
    const long blocks = divide_up(queries, tile_rows);
    for (long b = 0; b < blocks; b++) {
        const long q = queries * b / blocks, count = queries * (b + 1) / blocks - q;
        const Span low = visible(p, item.lane, item.first + q / group);
        const Span high = visible(p, item.lane, item.first + (q + count - 1) / group);
        const Span seen{std::max(low.begin - base, 0L), std::min(high.end - base, chunk)};
        if (seen.begin >= seen.end) continue;
        const long first_panel = seen.begin / panel_columns, last_panel = divide_up(seen.end, panel_columns);
        with_rows(int(count), Panels{buffers.queries + q * p.size, buffers.keys, buffers.scores, p.size, chunk, p.size,
                                     p.size * panel_columns, first_panel, last_panel});
        float peaks[tile_rows], totals[tile_rows];
        for (long r = 0; r < count; r++) {
            const Span own = visible(p, item.lane, item.first + (q + r) / group);
            const long begin = std::max(own.begin - base, 0L), end = std::max(begin, std::min(own.end - base, chunk));
            numerators(buffers.scores + r * chunk, {begin, end}, seen, p.scale, peaks + r, totals + r);
        }
        with_rows(int(count), Panels{buffers.scores + seen.begin, buffers.values + seen.begin * panel_columns,
                                     buffers.block, chunk, padded, seen.end - seen.begin, chunk * panel_columns, 0,
                                     padded / panel_columns});
        for (long r = 0; r < count; r++) buffers.state.join(q + r, peaks[r], totals[r], buffers.block + r * padded);
    }
}

template <class T>
void load_queries(const Problem& p, const T* q, const Item& item, float* out) {
    const long group = p.group(), width = group * p.size;
    for (long r = 0; r < item.rows; r++) {
        const T* row = q + ((p.starts[item.lane] + item.first + r) * p.heads + item.kv_head * group) * p.size;
        for (long i = 0; i < width; i += lanes) store_upto(out + r * width + i, load_upto(row + i, width - i), width - i);
    }
}

template <class T>
void store_result(const Problem& p, const State& state, const Item& item, T* out) {
    const long group = p.group();
    for (long query = 0; query < item.rows * group; query++) {
        const long row = p.starts[item.lane] + item.first + query / group;
        T* target = out + (row * p.heads + item.kv_head * group + query % group) * p.size;
        const float inverse = 1.0f / state.totals[query];
        for (long i = 0; i < p.size; i += lanes)
            store_upto(target + i, load(state.values + query * state.padded + i) * inverse, p.size - i);
    }
}

std::vector<Item> whole_items(const Problem& p, long lane_count) {
    const long rows_max = std::max(1L, queries_max / p.group());
    std::vector<Item> items;
    for (long lane = 0; lane < lane_count; lane++) {
        const long rows = p.starts[lane + 1] - p.starts[lane], tiles = divide_up(rows, rows_max);
        for (long tile = tiles - 1; tile >= 0; tile--)  // the longest first
            for (long head = 0; head < p.kv; head++) {
                const long first = rows * tile / tiles, count = rows * (tile + 1) / tiles - first;
                const long begin = visible(p, lane, first).begin / chunk;
                const long end = divide_up(visible(p, lane, first + count - 1).end, chunk);
                items.push_back({lane, first, count, head, begin, end});
            }
    }
    std::stable_sort(items.begin(), items.end(),
                     [](const Item& a, const Item& b) { return a.rows * (a.end - a.begin) > b.rows * (b.end - b.begin); });
    return items;
}

thread_local Scratch scratch;

template <class T>
Buffers prepare(const Problem& p, const T* q, const Item& item) {
    const long queries = item.rows * p.group(), padded = p.padded();
    Buffers buffers(scratch.take(Buffers::floats(queries, p.size, padded)), queries, p.size, padded);
    load_queries(p, q, item, buffers.queries);
    buffers.state.clear(queries);
    return buffers;
}

template <class T>
void attend_whole(const Problem& p, const T* q, const T* keys, const T* values, T* out, const std::vector<Item>& items,
                  long threads) {
    parallel_for(long(items.size()), threads, [&](long i) {
        Buffers buffers = prepare(p, q, items[i]);
        for (long c = items[i].begin; c < items[i].end; c++) attend_chunk(p, keys, values, items[i], c, buffers);
        store_result(p, buffers.state, items[i], out);
    });
}

// Each chunk on its own thread, then each item's chunks joined in order.
template <class T>
void attend_split(const Problem& p, const T* q, const T* keys, const T* values, T* out, const std::vector<Item>& items,
                  long threads) {
    const long padded = p.padded();
    struct Part { long item, chunk; size_t at; };
    std::vector<Part> parts;
    std::vector<size_t> firsts;
    size_t floats = 0;
    for (long i = 0; i < long(items.size()); i++) {
        firsts.push_back(parts.size());
        for (long c = items[i].begin; c < items[i].end; c++) {
            parts.push_back({i, c, floats});
            floats += divide_up(State::floats(items[i].rows * p.group(), padded), 16) * 16;
        }
    }
    firsts.push_back(parts.size());
    std::vector<float> memory(floats);
    parallel_for(long(parts.size()), threads, [&](long i) {
        const Item& item = items[parts[i].item];
        Buffers buffers = prepare(p, q, item);
        buffers.state = State(memory.data() + parts[i].at, item.rows * p.group(), padded);
        buffers.state.clear(item.rows * p.group());
        attend_chunk(p, keys, values, item, parts[i].chunk, buffers);
    });
    parallel_for(long(items.size()), threads, [&](long i) {
        const long queries = items[i].rows * p.group();
        State joined(memory.data() + parts[firsts[i]].at, queries, padded);
        for (size_t part = firsts[i] + 1; part < firsts[i + 1]; part++) {
            const State next(memory.data() + parts[part].at, queries, padded);
            for (long r = 0; r < queries; r++)
                joined.join(r, next.peaks[r], next.totals[r], next.values + r * padded);
        }
        store_result(p, joined, items[i], out);
    });
}

template <class T>
void attend(const Problem& p, const T* q, const T* keys, const T* values, T* out, long rows, long lane_count,
            long threads) {
    const long live = p.starts[lane_count];
    std::memset(static_cast<void*>(out + live * p.heads * p.size), 0, (rows - live) * p.heads * p.size * sizeof(T));
    const std::vector<Item> items = whole_items(p, lane_count);
    long chunks = 0;
    for (const Item& item : items) chunks += item.end - item.begin;
    const bool few = long(items.size()) < 4 * threads && chunks > long(items.size());
    if (few && threads > 1 && launch) attend_split(p, q, keys, values, out, items, threads);
    else attend_whole(p, q, keys, values, out, items, threads);
}

}  // namespace
}  // namespace dscale

using namespace dscale;

extern "C" {

// size: of a head; window 0: none; strides in elements.
void dscale_attention(const void* q, const void* keys, const void* values, void* out, const int32_t* table,
                      const int64_t* lane_rows, const int64_t* starts, const int64_t* contexts, long rows,
                      long lane_count, long heads, long kv, long size, long page_size, long page_stride,
                      long table_stride, int causal, long window, float scale, int bf16, long threads) {
    const Problem p{heads, kv, size, page_size, page_stride, table_stride, scale, causal != 0, window,
                    table, lane_rows, starts, contexts};
    if (bf16)
        attend(p, (const bfloat16*)q, (const bfloat16*)keys, (const bfloat16*)values, (bfloat16*)out, rows, lane_count,
               threads);
    else attend(p, (const float*)q, (const float*)keys, (const float*)values, (float*)out, rows, lane_count, threads);
}
}
