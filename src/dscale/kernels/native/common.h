// Shared by all CPU kernels: vectors of floats, bfloat16 conversion, exp. Parallel loops are in threads.h.
//
// Vectors are the compiler's own (GCC and Clang), so the same code runs on AVX512, AVX2, SSE and NEON. Every reduction
// has an order that depends on the reduced length only: a row's result never depends on the rows beside it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "threads.h"

#if defined(__AVX512F__)
#include <immintrin.h>
#define DSCALE_LANES 16
#elif defined(__AVX__)
#define DSCALE_LANES 8
#else
#define DSCALE_LANES 4
#endif

#define DSCALE_INLINE inline __attribute__((always_inline))

namespace dscale {

constexpr int lanes = DSCALE_LANES;
constexpr int panel_columns = 2 * lanes;  // columns of a packed panel: two vectors

typedef float Floats __attribute__((vector_size(4 * lanes)));
typedef uint32_t Words __attribute__((vector_size(4 * lanes)));
typedef uint16_t Halves __attribute__((vector_size(2 * lanes)));

struct bfloat16 {
    uint16_t bits;
};

template <class V, class T>
DSCALE_INLINE V read(const T* p) {
    V v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

template <class V, class T>
DSCALE_INLINE void write(T* p, V v) {
    std::memcpy(p, &v, sizeof v);
}

// Bits of bfloat16, each to and from a word of its own.
DSCALE_INLINE Words widened(const bfloat16* p) {
#if defined(__AVX512F__)
    return (Words)_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#else
    return __builtin_convertvector(read<Halves>(p), Words);
#endif
}
DSCALE_INLINE Halves narrowed(Words w) {
#if defined(__AVX512F__)
    return (Halves)_mm512_cvtepi32_epi16((__m512i)w);
#else
    return __builtin_convertvector(w, Halves);
#endif
}

DSCALE_INLINE Floats floats(Words w) { return (Floats)w; }
DSCALE_INLINE Words words(Floats f) { return (Words)f; }
DSCALE_INLINE Floats fill(float x) { return x - Floats{}; }

DSCALE_INLINE Floats load(const float* p) { return read<Floats>(p); }
DSCALE_INLINE Floats load(const bfloat16* p) { return floats(widened(p) << 16); }

DSCALE_INLINE Halves rounded(Floats x) {  // to nearest, ties to even; NaN stays NaN
    const Words w = words(x);
    const Words up = (w + 0x7fffu + ((w >> 16) & 1u)) >> 16;
    return narrowed(x == x ? up : (Words{} + 0x7fc0u));
}

DSCALE_INLINE void store(float* p, Floats x) { write(p, x); }
DSCALE_INLINE void store(bfloat16* p, Floats x) { write(p, rounded(x)); }

DSCALE_INLINE float scalar(float x) { return x; }
DSCALE_INLINE float scalar(bfloat16 x) {
    const uint32_t w = uint32_t(x.bits) << 16;
    float f;
    std::memcpy(&f, &w, 4);
    return f;
}

template <class T>
DSCALE_INLINE T cast(float x);
template <>
DSCALE_INLINE float cast<float>(float x) { return x; }
template <>
DSCALE_INLINE bfloat16 cast<bfloat16>(float x) {
    uint32_t w;
    std::memcpy(&w, &x, 4);
    if (x != x) return {0x7fc0};
    return {uint16_t((w + 0x7fffu + ((w >> 16) & 1u)) >> 16)};
}

// The first `count` elements, zeros behind them.
template <class T>
DSCALE_INLINE Floats load_part(const T* p, long count) {
    T buffer[lanes] = {};
    std::memcpy(buffer, p, count * sizeof(T));
    return load(buffer);
}

template <class T>
DSCALE_INLINE void store_part(T* p, Floats x, long count) {
    T buffer[lanes];
    store(buffer, x);
    std::memcpy(p, buffer, count * sizeof(T));
}

template <class T>
DSCALE_INLINE Floats load_upto(const T* p, long count) { return count >= lanes ? load(p) : load_part(p, count); }

DSCALE_INLINE Words widened_upto(const bfloat16* p, long count) {
    if (count >= lanes) return widened(p);
    bfloat16 buffer[lanes] = {};
    if (count > 0) std::memcpy(buffer, p, count * sizeof(bfloat16));
    return widened(buffer);
}

template <class T>
DSCALE_INLINE void store_upto(T* p, Floats x, long count) {
    if (count >= lanes) store(p, x);
    else store_part(p, x, count);
}

// x rounded to T and widened again.
template <class T>
DSCALE_INLINE Floats through(Floats x) {
    T buffer[lanes];
    store(buffer, x);
    return load(buffer);
}
template <>
DSCALE_INLINE Floats through<float>(Floats x) { return x; }

DSCALE_INLINE float sum(Floats x) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)x);
#endif
    float v[lanes];
    write(v, x);
    for (int width = lanes / 2; width; width /= 2)
        for (int i = 0; i < width; i++) v[i] += v[i + width];
    return v[0];
}

DSCALE_INLINE float largest(Floats x) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)x);
#endif
    float v[lanes];
    write(v, x);
    for (int width = lanes / 2; width; width /= 2)
        for (int i = 0; i < width; i++) v[i] = v[i] > v[i + width] ? v[i] : v[i + width];
    return v[0];
}

DSCALE_INLINE Floats maximum(Floats a, Floats b) {  // b where either is NaN
#if defined(__AVX512F__)
    return (Floats)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return a > b ? a : b;
#endif
}

// A positive number rounded to T, and its storing once it is.
template <class T>
DSCALE_INLINE Floats nearest(Floats x);
template <>
DSCALE_INLINE Floats nearest<float>(Floats x) { return x; }
template <>
DSCALE_INLINE Floats nearest<bfloat16>(Floats x) {
    const Words w = words(x);
    return floats((w + 0x7fffu + ((w >> 16) & 1u)) & 0xffff0000u);
}

DSCALE_INLINE void store_exact(float* p, Floats x) { store(p, x); }
DSCALE_INLINE void store_exact(bfloat16* p, Floats x) { write(p, narrowed(words(x) >> 16)); }

// e^x for x ≤ 88 within two units in the last place; below -87.3 the result is that of -87.3, the least normal float.
DSCALE_INLINE Floats exponential_down(Floats x) {
    x = maximum(fill(-87.3f), x);
    const Floats magic = fill(12582912.0f);  // 1.5 · 2^23: the sum's low bits hold the rounded integer
    const Floats shifted = x * 1.44269504088896341f + magic;
    const Floats n = shifted - magic;
    Floats r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + (r + 1.0f);
    const Words power = (words(shifted) + 127u) << 23;
    return p * floats(power);
}

// The same for every x: clamped above too, where the result would overflow.
DSCALE_INLINE Floats exponential(Floats x) { return exponential_down(x > fill(88.3f) ? fill(88.3f) : x); }

DSCALE_INLINE long divide_up(long a, long b) { return (a + b - 1) / b; }

}  // namespace dscale
