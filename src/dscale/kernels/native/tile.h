// The inner product that linear layers and attention share: R rows times one packed panel of 2 · lanes columns.
//
// A panel is [depth][columns]; in bfloat16 two consecutive depths lie side by side in one 32-bit word of
// [depth/2][columns].
// Each output is one chain of multiply-adds from depth 0 up, whatever R is.
#pragma once

#include "common.h"

namespace dscale {

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int tile_rows = 12;  // 24 accumulators of 32 registers
#else
constexpr int tile_rows = 4;  // 8 accumulators of 16 registers
#endif

template <int R>
using Accumulators = Floats[R][2];

constexpr int line = 64;  // bytes of a cache line

// What to bring into cache meanwhile: `Lines` lines a step from `next` on.
template <int Lines>
DSCALE_INLINE void fetch(const char* next, long step) {
    for (int i = 0; i < Lines; i++) __builtin_prefetch(next + (step * Lines + i) * line, 0, 2);
}

template <int R, int Lines = 0>
DSCALE_INLINE void multiply(
    Accumulators<R>& sums, const float* x, long stride, const float* panel, long depth,
    const char* next = nullptr) {
    for (long k = 0; k < depth; k++) {
        const Floats a = load(panel), b = load(panel + lanes);
        panel += panel_columns;
        fetch<Lines>(next, k);
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
            const float value = x[r * stride + k];
            sums[r][0] += a * value;
            sums[r][1] += b * value;
        }
    }
}

DSCALE_INLINE Floats pair_product(Floats total, Words weights, uint32_t pair) {
#if defined(__AVX512BF16__)
    return (Floats)_mm512_dpbf16_ps((__m512)total, (__m512bh)weights, (__m512bh)_mm512_set1_epi32(int(pair)));
#else
    total += floats(weights << 16) * scalar(bfloat16{uint16_t(pair)});
    total += floats(weights & 0xffff0000u) * scalar(bfloat16{uint16_t(pair >> 16)});
    return total;
#endif
}

template <int R, int Lines = 0>
DSCALE_INLINE void multiply(
    Accumulators<R>& sums, const bfloat16* x, long stride, const bfloat16* panel, long depth,
    const char* next = nullptr) {
    const long pairs = depth / 2;
    for (long k = 0; k < pairs; k++) {
        const Words a = read<Words>(panel), b = read<Words>(panel + 2 * lanes);
        panel += 2 * panel_columns;
        fetch<Lines>(next, k);
#pragma GCC unroll 12
        for (int r = 0; r < R; r++) {
            uint32_t pair;
            std::memcpy(&pair, x + r * stride + 2 * k, 4);
            sums[r][0] = pair_product(sums[r][0], a, pair);
            sums[r][1] = pair_product(sums[r][1], b, pair);
        }
    }
    if (depth % 2 == 0) return;
    const Words a = read<Words>(panel), b = read<Words>(panel + 2 * lanes);
    for (int r = 0; r < R; r++) {
        const uint32_t pair = x[r * stride + depth - 1].bits;
        sums[r][0] = pair_product(sums[r][0], a, pair);
        sums[r][1] = pair_product(sums[r][1], b, pair);
    }
}

// Call body.template run<R>() with R = rows, 1 … tile_rows.
template <int R = tile_rows, class Body>
DSCALE_INLINE void with_rows(int rows, const Body& body) {
    if (rows == R) return body.template run<R>();
    if constexpr (R > 1) with_rows<R - 1>(rows, body);
}

}  // namespace dscale
