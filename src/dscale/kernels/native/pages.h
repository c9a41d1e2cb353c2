// What attention reads and multiplies: pages of one key head, keys turned into panels, scores and weighted values of a
// block of queries.
#pragma once

#include "tile.h"

namespace dscale {

constexpr long chunk = 256;  // tokens; part of the order of summation

struct Span {
    long begin, end;  // tokens
};

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

// A tensor of pages as one key head of one lane sees it.
template <class T>
struct Pages {
    const T* data;
    const int32_t* table;
    long page_stride, page_size, head_offset, size;

    Pages(const Problem& p, const T* cache, long lane, long kv_head)
        : data(cache), table(p.table + p.lanes[lane] * p.table_stride), page_stride(p.page_stride),
          page_size(p.page_size), head_offset(kv_head * p.page_size * p.size), size(p.size) {}

    const T* at(long token) const {
        return data + table[token / page_size] * page_stride + head_offset + token % page_size * size;
    }

    // Tokens from this one to the end of its page, or to `end`.
    long run(long token, long end) const { return std::min(page_size - token % page_size, end - token); }

    void fetch(Span tokens) const {
        for (long token = tokens.begin; token < tokens.end;) {
            const long count = run(token, tokens.end), bytes = count * size * long(sizeof(T));
            const char* start = reinterpret_cast<const char*>(at(token));
            for (long i = 0; i < bytes; i += line) __builtin_prefetch(start + i, 0, 2);
            token += count;
        }
    }
};

#if defined(__AVX512F__)
// 16 keys of 16 words → 16 rows of a key panel.
DSCALE_INLINE void transpose(const uint32_t* keys, long stride, uint32_t* out) {
    __m512 a[16], b[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_ps(keys + i * stride);
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        b[2 * i] = _mm512_unpacklo_ps(a[2 * i], a[2 * i + 1]);
        b[2 * i + 1] = _mm512_unpackhi_ps(a[2 * i], a[2 * i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        const __m512* c = b + 4 * i;
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

// Keys of tokens → columns of a panel that starts at token `base`: [words of a head][columns], see tile.h. A whole
// page of 16 is read even where only some of its keys are wanted; what the others hold is masked later.
template <class T>
void gather_keys(const Pages<T>& keys, Span tokens, long base, uint32_t* panel) {
    const long words = keys.size * long(sizeof(T)) / 4;
    for (long token = tokens.begin; token < tokens.end;) {
        const long count = keys.run(token, tokens.end);
        const T* from = keys.at(token);
        long column = token - base, done = 0, copied = count;
        token += count;
#if defined(__AVX512F__)
        if (keys.page_size == 16) {
            from -= column % 16 * keys.size, copied = 16, column -= column % 16;
            for (; done + 16 <= words; done += 16)
                transpose(reinterpret_cast<const uint32_t*>(from) + done, words, panel + done * panel_columns + column);
        }
#endif
        for (long t = 0; t < copied && done < words; t++)
            for (long i = done; i < words; i++)
                std::memcpy(panel + i * panel_columns + column + t, from + t * keys.size + i * 4 / long(sizeof(T)), 4);
    }
}

// Queries [R][size] times one key panel → scores [R][chunk].
template <class T>
struct Scores {
    const T* queries;
    const T* panel;
    float* out;
    long size;

    template <int R>
    void run() const {
        Accumulators<R> sums = {};
        multiply<R>(sums, queries, size, panel, size);
        for (int r = 0; r < R; r++) {
            store(out + r * chunk, sums[r][0]);
            store(out + r * chunk + lanes, sums[r][1]);
        }
    }
};

// The next values of a run of tokens and what follows them in memory while they are used.
template <class T>
struct Run {
    const T* values;
    const T* next;  // to fetch, a row a token
    long stride, count;

    DSCALE_INLINE void fetch(long token) const {
        const T* from = next + token * stride;
        for (long i = 0; i < panel_columns; i += line / long(sizeof(T))) __builtin_prefetch(from + i, 0, 2);
    }
};

// Add weights [R][chunk] times the run's values to the sums; `left` columns are wanted, all of them where `whole`.
template <int R, bool whole>
DSCALE_INLINE void accumulate(Accumulators<R>& sums, const float* weights, const Run<float>& run, long left) {
    for (long t = 0; t < run.count; t++) {
        const float* from = run.values + t * run.stride;
        run.fetch(t);
        const Floats a = whole ? load(from) : load_upto(from, left);
        const Floats b = whole ? load(from + lanes) : load_upto(from + lanes, std::max(left - lanes, 0L));
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
            const float factor = weights[r * chunk + t];
            sums[r][0] += a * factor;
            sums[r][1] += b * factor;
        }
    }
}

// In bfloat16 two tokens at a time, the first at an even place; rows of weights are as long in bytes as those of float.
template <int R, bool whole>
DSCALE_INLINE void accumulate(Accumulators<R>& sums, const bfloat16* weights, const Run<bfloat16>& run, long left) {
    for (long t = 0; t < run.count; t += 2) {
        const bfloat16 *from = run.values + t * run.stride, *other = from + run.stride;
        run.fetch(t);
        run.fetch(t + 1);
        const long right = left - lanes;
        Words a = whole ? widened(from) : widened_upto(from, left);
        Words b = whole ? widened(from + lanes) : widened_upto(from + lanes, right);
        if (t + 1 < run.count) {  // beyond the last token nothing may have been written
            a |= (whole ? widened(other) : widened_upto(other, left)) << 16;
            b |= (whole ? widened(other + lanes) : widened_upto(other + lanes, right)) << 16;
        }
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
            uint32_t pair;
            std::memcpy(&pair, weights + r * 2 * chunk + t, 4);
            sums[r][0] = pair_product(sums[r][0], a, pair);
            sums[r][1] = pair_product(sums[r][1], b, pair);
        }
    }
}

// Weights of T [R][chunk floats' space] times the values of tokens → out [R][padded], in order of tokens.
template <class T>
struct Weighted {
    const T* weights;  // of token `base`
    const Pages<T>& values;
    const Pages<T>& keys;
    float* out;
    long base, padded;
    Span tokens;     // begins at an even place
    long fetch_end;  // keys of the next chunk up to here are fetched meanwhile

    template <int R, bool whole>
    DSCALE_INLINE void columns(long column) const {
        Accumulators<R> sums = {};
        for (long token = tokens.begin; token < tokens.end;) {
            const T* from = values.at(token) + column;
            const T* next = token + chunk < fetch_end ? keys.at(token + chunk) + column : from;
            const Run<T> run{from, next, values.size, values.run(token, tokens.end)};
            accumulate<R, whole>(sums, weights + token - base, run, values.size - column);
            token += run.count;
        }
        for (int r = 0; r < R; r++) {
            store(out + r * padded + column, sums[r][0]);
            store(out + r * padded + column + lanes, sums[r][1]);
        }
    }

    template <int R>
    void run() const {
        for (long column = 0; column < values.size; column += panel_columns) {
            if (column + panel_columns <= values.size) columns<R, true>(column);
            else columns<R, false>(column);
        }
    }
};

}  // namespace dscale
