// y = x · weightᵀ + bias on a packed weight.
//
// pack: weight [out, in] → panels [out / columns][in][columns], the last one padded with zeros (see tile.h).
// Threads take runs of panels; a panel is read from memory once and stays in cache for all rows of the row tile.
#include "tile.h"

namespace dscale {
namespace {

constexpr long cached_bytes = 256 * 1024;  // of x, so that a row tile stays in the second-level cache
constexpr long share_bytes = 32 * 1024;    // of weight, the least worth a thread
constexpr long run_panels = 16;             // most panels that one thread takes at a time
constexpr long ahead = 16 * 1024;          // bytes between a fetch and its use: the time of about 100 ns and more

template <class T>
long panel_size(long depth);
template <>
long panel_size<float>(long depth) { return depth * panel_columns; }
template <>
long panel_size<bfloat16>(long depth) { return divide_up(depth, 2) * 2 * panel_columns; }

void pack_panel(const float* weight, float* panel, long columns, long depth) {
    for (long k = 0; k < depth; k++)
        for (long c = 0; c < panel_columns; c++)
            panel[k * panel_columns + c] = c < columns ? weight[c * depth + k] : 0.0f;
}

void pack_panel(const bfloat16* weight, bfloat16* panel, long columns, long depth) {
    for (long k = 0; k < depth; k++)
        for (long c = 0; c < panel_columns; c++)
            panel[((k / 2) * panel_columns + c) * 2 + k % 2] = c < columns ? weight[c * depth + k] : bfloat16{0};
    if (depth % 2)
        for (long c = 0; c < panel_columns; c++) panel[((depth / 2) * panel_columns + c) * 2 + 1] = bfloat16{0};
}

template <class T>
struct Product {
    const T* x;
    const T* panel;
    const T* bias;
    T* y;
    long x_stride, y_stride, depth, columns;
    const char* next;  // what to fetch meanwhile
    int lines;         // lines a step

    template <int R>
    void run() const {
        Accumulators<R> sums = {};
        if (lines == 2) multiply<R, 2>(sums, x, x_stride, panel, depth, next);
        else if (lines == 1) multiply<R, 1>(sums, x, x_stride, panel, depth, next);
        else multiply<R>(sums, x, x_stride, panel, depth);
        for (int half = 0; half < 2; half++) {
            const long left = columns - half * lanes;
            if (left <= 0) return;
            const Floats offset = bias ? load_upto(bias + half * lanes, left) : Floats{};
            for (int r = 0; r < R; r++)
                store_upto(y + r * y_stride + half * lanes, bias ? sums[r][half] + offset : sums[r][half], left);
        }
    }
};

// Meanwhile fetches what comes next: with one block of rows, `ahead` bytes before they are needed; with more, the next
// panel in two halves while this one, already in cache, serves the first two blocks.
template <class T>
void multiply_panel(Product<T> product, long rows, long panel_bytes, bool more) {
    const T *x = product.x;
    T* y = product.y;
    const char* panel = reinterpret_cast<const char*>(product.panel);
    const long blocks = divide_up(rows, tile_rows);
    for (long b = 0; b < blocks; b++) {
        const long first = rows * b / blocks, last = rows * (b + 1) / blocks;
        product.x = x + first * product.x_stride;
        product.y = y + first * product.y_stride;
        product.lines = !more || b >= 2 ? 0 : blocks == 1 ? 2 : 1;
        product.next = panel + (blocks == 1 ? ahead : panel_bytes + b * (panel_bytes / 2));
        with_rows(int(last - first), product);
    }
}

template <class T>
void linear(const T* x, const T* packed, const T* bias, T* y, long rows, long outs, long depth, long threads) {
    const long panels = divide_up(outs, panel_columns), size = panel_size<T>(depth);
    threads = std::min(threads, panels * size * long(sizeof(T)) * divide_up(rows, tile_rows) / share_bytes);
    const long tile = std::max<long>(tile_rows, cached_bytes / long(depth * sizeof(T)) / tile_rows * tile_rows);
    const long step = std::clamp(panels / (std::max(threads, 1L) * 8), 1L, run_panels);
    parallel_ranges(panels, step, threads, [&](long first, long last) {
        for (long row = 0; row < rows; row += tile)
            for (long p = first; p < last; p++) {
                const long column = p * panel_columns;
                Product<T> product{x + row * depth, packed + p * size, bias ? bias + column : nullptr,
                                   y + row * outs + column, depth, outs, depth,
                                   std::min<long>(panel_columns, outs - column), nullptr, 0};
                multiply_panel(product, std::min(tile, rows - row), size * long(sizeof(T)), p + 1 < panels);
            }
    });
}

template <class T>
void pack(const T* weight, T* packed, long outs, long depth, long threads) {
    const long size = panel_size<T>(depth);
    parallel_for(divide_up(outs, panel_columns), threads, [&](long p) {
        const long column = p * panel_columns;
        pack_panel(weight + column * depth, packed + p * size, std::min<long>(panel_columns, outs - column), depth);
    });
}

}  // namespace
}  // namespace dscale

using namespace dscale;

extern "C" {

long dscale_fast_bfloat16() {
#if defined(__AVX512BF16__)
    return 1;
#else
    return 0;
#endif
}

// Elements of the packed copy of a weight [outs, depth].
long dscale_packed_size(long outs, long depth, int bf16) {
    const long panels = divide_up(outs, panel_columns);
    return panels * (bf16 ? panel_size<bfloat16>(depth) : panel_size<float>(depth));
}

void dscale_pack(const void* weight, void* packed, long outs, long depth, int bf16, long threads) {
    if (bf16) pack((const bfloat16*)weight, (bfloat16*)packed, outs, depth, threads);
    else pack((const float*)weight, (float*)packed, outs, depth, threads);
}

void dscale_linear(const void* x, const void* packed, const void* bias, void* y, long rows, long outs, long depth,
                   int bf16, long threads) {
    if (bf16)
        linear((const bfloat16*)x, (const bfloat16*)packed, (const bfloat16*)bias, (bfloat16*)y, rows, outs, depth,
               threads);
    else linear((const float*)x, (const float*)packed, (const float*)bias, (float*)y, rows, outs, depth, threads);
}
}
