// RMS norm, alone or after a residual add, and the SiLU gate; formulas in kernels/norm.py and kernels/activation.py.
#include "common.h"

namespace dscale {

Launch launch = nullptr;
thread_local Team* team = nullptr;

namespace {

constexpr long slice_elements = 16384;  // less than this is not worth waking a thread for

template <class T, class W>
void normalise(const T* x, const W* weight, T* y, long size, float eps) {
    Floats squares[2] = {};
    for (long i = 0, turn = 0; i < size; i += lanes, turn ^= 1) {
        const Floats v = load_upto(x + i, size - i);
        squares[turn] += v * v;
    }
    const float scale = 1.0f / std::sqrt(sum(squares[0] + squares[1]) / float(size) + eps);
    for (long i = 0; i < size; i += lanes) {
        const Floats v = load_upto(x + i, size - i) * scale;
        store_upto(y + i, v * load_upto(weight + i, size - i), size - i);
    }
}

template <class T>
void add(const T* x, const T* residual, T* total, long size) {
    for (long i = 0; i < size; i += lanes)
        store_upto(total + i, load_upto(x + i, size - i) + load_upto(residual + i, size - i), size - i);
}

template <class T, class W>
void norm(const T* x, const T* residual, const W* weight, T* y, T* total, long rows, long size, float eps,
          long threads) {
    parallel_slices(rows, slice_elements / size, threads, [&](long first, long last) {
        for (long r = first; r < last; r++) {
            if (residual) add(x + r * size, residual + r * size, total + r * size, size);
            normalise((residual ? total : x) + r * size, weight, y + r * size, size, eps);
        }
    });
}

template <class T>
void silu_mul(const T* x, T* y, long rows, long size, long threads) {
    parallel_slices(rows, slice_elements / 2 / size, threads, [&](long first, long last) {
        for (long r = first; r < last; r++) {
            const T *gate = x + 2 * r * size, *up = gate + size;
            for (long i = 0; i < size; i += lanes) {
                const Floats g = load_upto(gate + i, size - i), u = load_upto(up + i, size - i);
                store_upto(y + r * size + i, g / (exponential(-g) + 1.0f) * u, size - i);
            }
        }
    });
}

}  // namespace
}  // namespace dscale

using namespace dscale;

extern "C" {

void dscale_set_launch(void* parallel) { launch = (Launch)parallel; }

// residual and total null: the norm alone. wide: the weight is float32 although x is bfloat16.
void dscale_norm(const void* x, const void* residual, const void* weight, void* y, void* total, long rows, long size,
                 float eps, int bf16, int wide, long threads) {
    typedef const bfloat16* B;
    typedef const float* F;
    if (!bf16) norm((F)x, (F)residual, (F)weight, (float*)y, (float*)total, rows, size, eps, threads);
    else if (wide) norm((B)x, (B)residual, (F)weight, (bfloat16*)y, (bfloat16*)total, rows, size, eps, threads);
    else norm((B)x, (B)residual, (B)weight, (bfloat16*)y, (bfloat16*)total, rows, size, eps, threads);
}

void dscale_silu_mul(const void* x, void* y, long rows, long size, int bf16, long threads) {
    if (bf16) silu_mul((const bfloat16*)x, (bfloat16*)y, rows, size, threads);
    else silu_mul((const float*)x, (float*)y, rows, size, threads);
}
}
