// Split a fused qkv row, norm q and k per head, rotate, write k and v to the paged cache; formulas in kernels/rotary.py.
#include <vector>

#include "common.h"

namespace dscale {
namespace {

constexpr long slice_elements = 16384;

struct Shape {
    long heads, kv, size;  // size: of one head
    bool interleaved;
    float eps;
};

// One head in float32, normed and rounded as the norm on its own would leave it.
template <class T>
void read_head(const T* x, const T* norm, float* head, const Shape& shape) {
    Floats squares = {};
    for (long i = 0; i < shape.size; i += lanes) {
        const Floats v = load_upto(x + i, shape.size - i);
        squares += v * v;
        store_upto(head + i, v, shape.size - i);
    }
    if (!norm) return;
    const float scale = 1.0f / std::sqrt(sum(squares) / float(shape.size) + shape.eps);
    for (long i = 0; i < shape.size; i += lanes) {
        const Floats v = load_upto(head + i, shape.size - i) * scale;
        store_upto(head + i, through<T>(v * load_upto(norm + i, shape.size - i)), shape.size - i);
    }
}

// cos and sin: half a head each.
template <class T>
void rotate(const float* head, const float* cos, T* out, const Shape& shape) {
    const long half = shape.size / 2;
    const float* sin = cos + half;
    if (shape.interleaved) {
        for (long i = 0; i < half; i++) {
            const float a = head[2 * i], b = head[2 * i + 1];
            out[2 * i] = cast<T>(a * cos[i] - b * sin[i]);
            out[2 * i + 1] = cast<T>(b * cos[i] + a * sin[i]);
        }
        return;
    }
    for (long i = 0; i < half; i += lanes) {
        const long left = half - i;
        const Floats a = load_upto(head + i, left), b = load_upto(head + half + i, left);
        const Floats c = load_upto(cos + i, left), s = load_upto(sin + i, left);
        store_upto(out + i, a * c - b * s, left);
        store_upto(out + half + i, b * c + a * s, left);
    }
}

template <class T>
struct Cache {
    T *keys, *values;
    long page_stride, page_size;

    long offset(long slot, long kv_head, long size) const {
        return slot / page_size * page_stride + (kv_head * page_size + slot % page_size) * size;
    }
};

template <class T>
void split_rotate_write(const T* qkv, const float* angles, const T* q_norm, const T* k_norm, const Cache<T>& cache,
                        const int64_t* slots, T* q, long rows, const Shape& shape, long threads) {
    const long size = shape.size, width = (shape.heads + 2 * shape.kv) * size;
    parallel_slices(rows, slice_elements / width, threads, [&](long first, long last) {
        std::vector<float> head(size + lanes);
        for (long r = first; r < last; r++) {
            const T* x = qkv + r * width;
            const float* cos = angles + r * size;
            for (long h = 0; h < shape.heads; h++) {
                read_head(x + h * size, q_norm, head.data(), shape);
                rotate(head.data(), cos, q + (r * shape.heads + h) * size, shape);
            }
            for (long h = 0; h < shape.kv; h++) {
                const long at = cache.offset(slots[r], h, size);
                read_head(x + (shape.heads + h) * size, k_norm, head.data(), shape);
                rotate(head.data(), cos, cache.keys + at, shape);
                std::memcpy(cache.values + at, x + (shape.heads + shape.kv + h) * size, size * sizeof(T));
            }
        }
    });
}

// k, v of all layers of one row: [layers][2][kv][size]; caches [layers, 2, pages, kv, page, size] by their strides.
template <class T>
void write_context(const T* kv, const float* angles, const T* const* norms, T* cache, long layer_stride,
                   long value_stride, long page_stride, long page_size, const int64_t* slots, long rows, long layers,
                   const Shape& shape, long threads) {
    const long size = shape.size, part = shape.kv * size;
    parallel_slices(rows, slice_elements / (layers * 2 * part), threads, [&](long first, long last) {
        std::vector<float> head(size + lanes);
        for (long r = first; r < last; r++)
            for (long layer = 0; layer < layers; layer++) {
                const T* k = kv + (r * layers + layer) * 2 * part;
                T* keys = cache + layer * layer_stride;
                const Cache<T> target{keys, keys + value_stride, page_stride, page_size};
                for (long h = 0; h < shape.kv; h++) {
                    const long at = target.offset(slots[r], h, size);
                    read_head(k + h * size, norms ? norms[layer] : nullptr, head.data(), shape);
                    rotate(head.data(), angles + r * size, target.keys + at, shape);
                    std::memcpy(target.values + at, k + part + h * size, size * sizeof(T));
                }
            }
    });
}

}  // namespace
}  // namespace dscale

using namespace dscale;

extern "C" {

void dscale_split_rotate_write(const void* qkv, const float* angles, const void* q_norm, const void* k_norm, void* keys,
                               void* values, long page_stride, long page_size, const int64_t* slots, void* q, long rows,
                               long heads, long kv, long size, int interleaved, float eps, int bf16, long threads) {
    const Shape shape{heads, kv, size, interleaved != 0, eps};
    if (bf16) {
        const Cache<bfloat16> cache{(bfloat16*)keys, (bfloat16*)values, page_stride, page_size};
        split_rotate_write((const bfloat16*)qkv, angles, (const bfloat16*)q_norm, (const bfloat16*)k_norm, cache, slots,
                           (bfloat16*)q, rows, shape, threads);
    } else {
        const Cache<float> cache{(float*)keys, (float*)values, page_stride, page_size};
        split_rotate_write((const float*)qkv, angles, (const float*)q_norm, (const float*)k_norm, cache, slots,
                           (float*)q, rows, shape, threads);
    }
}

void dscale_write_context(const void* kv, const float* angles, const void* norms, void* cache, long layer_stride,
                          long value_stride, long page_stride, long page_size, const int64_t* slots, long rows,
                          long layers, long heads, long size, int interleaved, float eps, int bf16, long threads) {
    const Shape shape{0, heads, size, interleaved != 0, eps};
    if (bf16)
        write_context((const bfloat16*)kv, angles, (const bfloat16* const*)norms, (bfloat16*)cache, layer_stride,
                      value_stride, page_stride, page_size, slots, rows, layers, shape, threads);
    else
        write_context((const float*)kv, angles, (const float* const*)norms, (float*)cache, layer_stride, value_stride,
                      page_stride, page_size, slots, rows, layers, shape, threads);
}
}
