// Attention of ragged rows over a paged cache; semantics in kernels/attention.py.
//
// One item of work = some rows of one request and all query heads of one key head ("queries"), so that a page is read
// once for all of them. The context is cut at multiples of `chunk` tokens; every query gets the scores, softmax
// numerators and weighted values of a chunk on its own, and chunks are then joined in order. Long contexts with few
// items hand out single chunks and join them in a second pass, by the same arithmetic: a row's result depends neither on
// the batch nor on the number of threads.
#include <vector>

#include "pages.h"

namespace dscale {
namespace {

constexpr long queries_max = 64;  // of an item, unless one row has more
constexpr long ahead = 64;        // tokens between the fetch of keys and their use: pages lie anywhere in memory

struct Item {
    long lane, first, rows, kv_head;  // first: row within the lane
    long begin, end;                  // chunks
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

// Which of the tokens from `token` on lie in the span.
DSCALE_INLINE Words inside(long token, Span span) {
    Words at;
    for (int i = 0; i < lanes; i++) at[i] = uint32_t(i);
    return (Words)(at + uint32_t(token - span.begin) < Words{} + uint32_t(span.end - span.begin));
}

// Scores [chunk] → numerators e^(scale · score - peak) within the span (relative to the chunk), zeros around it. They
// are left as T from the same address on; the total is that of the numerators as rounded.
template <class T>
void numerators(float* scores, Span span, Span computed, float scale, float* peak, float* total) {
    Floats highest = fill(-INFINITY), sums = {};
    const long first = computed.begin / lanes * lanes;
    const auto whole = [&](long i) { return i >= span.begin && i + lanes <= span.end; };
    for (long i = first; i < computed.end; i += lanes) {
        const Floats score = load(scores + i);
        highest = maximum(highest, whole(i) ? score : inside(i, span) ? score : fill(-INFINITY));
    }
    const float top = *peak = largest(highest) * scale;
    for (long i = first; i < computed.end; i += lanes) {
        Floats e = nearest<T>(exponential_down(load(scores + i) * scale - top));
        if (!whole(i)) e = inside(i, span) ? e : Floats{};
        store_exact(reinterpret_cast<T*>(scores) + i, e);
        sums += e;
    }
    *total = sum(sums);
}

template <class T>
struct Buffers {
    T* queries;
    uint32_t* keys;
    float *scores, *block;
    State state;

    static size_t floats(long queries, long size, long padded) {
        const size_t own = queries * (size + chunk) + size * panel_columns + tile_rows * padded;
        return own + State::floats(queries, padded) + 5 * 16;
    }
    Buffers(float* memory, long count, long size, long padded)
        : queries(reinterpret_cast<T*>(aligned(memory, count * size))),
          keys(reinterpret_cast<uint32_t*>(aligned(memory, size * panel_columns))),
          scores(aligned(memory, count * chunk)), block(aligned(memory, tile_rows * padded)),
          state(aligned(memory, State::floats(count, padded)), count, padded) {}

    static float* aligned(float*& memory, long floats) {
        float* mine = memory;
        memory += divide_up(floats, 16) * 16;
        return mine;
    }
};

// Consecutive queries of an item that are computed together, and the tokens that any of them sees.
struct Block {
    long first, count;
    Span seen;
};

template <class T>
void weigh_values(const Problem& p, const Pages<T>& keys, const Pages<T>& values, const Item& item, const Block& block,
                  Span tokens, long fetch_end, Buffers<T>& buffers) {
    const long base = tokens.begin / chunk * chunk, group = p.group();
    float* scores = buffers.scores + block.first * chunk;
    const Span computed{block.seen.begin - base, block.seen.end - base};
    float peaks[tile_rows], totals[tile_rows];
    for (long r = 0; r < block.count; r++) {
        const Span own = visible(p, item.lane, item.first + (block.first + r) / group);
        const long begin = std::max(own.begin - base, 0L), end = std::max(begin, std::min(own.end - base, chunk));
        numerators<T>(scores + r * chunk, {begin, end}, computed, p.scale, peaks + r, totals + r);
    }
    const Span even{block.seen.begin / 2 * 2, block.seen.end};
    with_rows(int(block.count), Weighted<T>{reinterpret_cast<const T*>(scores), values, keys, buffers.block, base,
                                            p.padded(), even, fetch_end});
    for (long r = 0; r < block.count; r++)
        buffers.state.join(block.first + r, peaks[r], totals[r], buffers.block + r * p.padded());
}

// One chunk of tokens for all queries of an item, joined to buffers.state.
template <class T>
void attend_chunk(const Problem& p, const Pages<T>& keys, const Pages<T>& values, const Item& item, long index,
                  Buffers<T>& buffers) {
    const long group = p.group(), queries = item.rows * group, base = index * chunk;
    const long end = std::min(visible(p, item.lane, item.first + item.rows - 1).end, item.end * chunk);
    const Span tokens{std::max(visible(p, item.lane, item.first).begin, base), std::min(end, base + chunk)};
    const long blocks = divide_up(queries, tile_rows);
    const auto block = [&](long b) {
        const long first = queries * b / blocks, last = queries * (b + 1) / blocks;
        const Span low = visible(p, item.lane, item.first + first / group);
        const Span high = visible(p, item.lane, item.first + (last - 1) / group);
        return Block{first, last - first, {std::max(low.begin, base), std::min(high.end, base + chunk)}};
    };
    for (long at = tokens.begin / panel_columns * panel_columns; at < tokens.end; at += panel_columns) {
        const Span now{std::max(at, tokens.begin), std::min(at + panel_columns, tokens.end)};
        if (index == item.begin) keys.fetch({now.begin + ahead, std::min(now.end + ahead, tokens.end)});
        values.fetch(now);
        gather_keys(keys, now, at, buffers.keys);
        for (long b = 0; b < blocks; b++) {
            const Block rows = block(b);
            if (rows.seen.begin >= now.end || rows.seen.end <= now.begin) continue;
            with_rows(int(rows.count),
                      Scores<T>{buffers.queries + rows.first * p.size, reinterpret_cast<const T*>(buffers.keys),
                                buffers.scores + rows.first * chunk + at - base, p.size});
        }
    }
    for (long b = 0; b < blocks; b++) {
        const Block rows = block(b);
        if (rows.seen.begin >= rows.seen.end) continue;
        weigh_values(p, keys, values, item, rows, tokens, b == 0 ? end : 0, buffers);
    }
}

template <class T>
void load_queries(const Problem& p, const T* q, const Item& item, T* out) {
    const long width = p.group() * p.size;
    for (long r = 0; r < item.rows; r++) {
        const long row = p.starts[item.lane] + item.first + r;
        std::memcpy(out + r * width, q + row * p.heads * p.size + item.kv_head * width, width * sizeof(T));
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
    const auto cost = [](const Item& item) { return item.rows * (item.end - item.begin); };
    std::stable_sort(items.begin(), items.end(), [&](const Item& a, const Item& b) { return cost(a) > cost(b); });
    return items;
}

thread_local Scratch scratch;

template <class T>
Buffers<T> prepare(const Problem& p, const T* q, const Item& item) {
    const long queries = item.rows * p.group(), padded = p.padded();
    Buffers<T> buffers(scratch.take(Buffers<T>::floats(queries, p.size, padded)), queries, p.size, padded);
    load_queries(p, q, item, buffers.queries);
    buffers.state.clear(queries);
    return buffers;
}

template <class T>
void attend_whole(const Problem& p, const T* q, const T* keys, const T* values, T* out, const std::vector<Item>& items,
                  long threads) {
    parallel_for(long(items.size()), threads, [&](long i) {
        const Item& item = items[i];
        const Pages<T> k(p, keys, item.lane, item.kv_head), v(p, values, item.lane, item.kv_head);
        Buffers<T> buffers = prepare(p, q, item);
        const Span seen = visible(p, item.lane, item.first);
        k.fetch({seen.begin, std::min(seen.end, seen.begin + ahead)});
        for (long c = item.begin; c < item.end; c++) attend_chunk(p, k, v, item, c, buffers);
        store_result(p, buffers.state, item, out);
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
        Item item = items[parts[i].item];
        item.begin = parts[i].chunk, item.end = item.begin + 1;
        const Pages<T> k(p, keys, item.lane, item.kv_head), v(p, values, item.lane, item.kv_head);
        Buffers<T> buffers = prepare(p, q, item);
        buffers.state = State(memory.data() + parts[i].at, item.rows * p.group(), padded);
        buffers.state.clear(item.rows * p.group());
        attend_chunk(p, k, v, item, item.begin, buffers);
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
