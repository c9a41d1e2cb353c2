// All layers of a decoder in one call: the kernels of this folder in the order of DecoderStack.forward, so that a step of
// one row does not wait for thirty turns of Python. Results are those of the separate calls, bit for bit.
#include <cstdint>
#include <cstring>

#include "threads.h"

extern "C" {

void dscale_linear(const void*, const void*, const void*, void*, long, long, long, int, long);
void dscale_norm(const void*, const void*, const void*, void*, void*, long, long, float, int, int, long);
void dscale_silu_mul(const void*, void*, long, long, int, long);
void dscale_split_rotate_write(const void*, const float*, const void*, const void*, void*, void*, long, long,
                               const int64_t*, void*, long, long, long, long, int, float, int, long);
void dscale_attention(const void*, const void*, const void*, void*, const int32_t*, const int64_t*, const int64_t*,
                      const int64_t*, long, long, long, long, long, long, long, long, int, long, float, int, long);

// One layer; weights packed, biases and head norms may be null. window 0: none.
struct DscaleLayer {
    const void *input_norm, *qkv, *qkv_bias, *q_norm, *k_norm, *output, *output_bias, *post_norm;
    const void *gate_up, *gate_up_bias, *down, *down_bias;
    int64_t window, causal;  // causal -1: as the batch says
};

struct DscaleStack {
    const DscaleLayer* layers;
    const void* final_norm;
    int64_t count, hidden, inner, heads, kv, size, interleaved, bf16;
    float eps, scale;
};

// Strides in elements. scratch: see dscale_stack_scratch. taps: [rows][tap_count · hidden], tap_layers ascending.
struct DscaleRows {
    const void* x;
    void *out, *taps, *cache, *scratch;
    const int64_t* tap_layers;
    const float* angles;
    const int64_t *slots, *lanes, *starts, *contexts;
    const int32_t* table;
    int64_t tap_count, rows, lane_count, page_size, page_stride, layer_stride, value_stride, table_stride, causal;
    int64_t threads;
};

// Elements of scratch that `rows` rows need.
long dscale_stack_scratch(const DscaleStack* s, long rows) {
    const long attended = s->heads * s->size, fused = attended + 2 * s->kv * s->size;
    return rows * (3 * s->hidden + fused + 2 * attended + 3 * s->inner);
}

static void run_stack(const DscaleStack* s, const DscaleRows* b) {
    const long item = s->bf16 ? 2 : 4, rows = b->rows, hidden = s->hidden, inner = s->inner, threads = b->threads;
    const long attended = s->heads * s->size, fused = attended + 2 * s->kv * s->size;
    const int bf16 = int(s->bf16);
    char* memory = static_cast<char*>(b->scratch);
    const auto take = [&](long width) {
        char* mine = memory;
        memory += rows * width * item;
        return mine;
    };
    char *residual = take(hidden), *normed = take(hidden), *added = take(hidden), *qkv = take(fused);
    char *q = take(attended), *mixed = take(attended), *gate_up = take(2 * inner), *gated = take(inner);
    char* cache = static_cast<char*>(b->cache);
    std::memcpy(residual, b->x, rows * hidden * item);
    dscale_norm(residual, nullptr, s->layers[0].input_norm, normed, nullptr, rows, hidden, s->eps, bf16, 0, threads);
    long tap = 0;
    for (long i = 0; i < s->count; i++) {
        const DscaleLayer& w = s->layers[i];
        char *keys = cache + i * b->layer_stride * item, *values = keys + b->value_stride * item;
        dscale_linear(normed, w.qkv, w.qkv_bias, qkv, rows, fused, hidden, bf16, threads);
        dscale_split_rotate_write(qkv, b->angles, w.q_norm, w.k_norm, keys, values, b->page_stride, b->page_size,
                                  b->slots, q, rows, s->heads, s->kv, s->size, int(s->interleaved), s->eps, bf16, threads);
        if (i + 1 == s->count && !b->out) return;  // only the cache and the taps are wanted
        dscale_attention(q, keys, values, mixed, b->table, b->lanes, b->starts, b->contexts, rows, b->lane_count,
                         s->heads, s->kv, s->size, b->page_size, b->page_stride, b->table_stride,
                         int(w.causal < 0 ? b->causal : w.causal), w.window, s->scale, bf16, threads);
        dscale_linear(mixed, w.output, w.output_bias, added, rows, hidden, attended, bf16, threads);
        dscale_norm(added, residual, w.post_norm, normed, residual, rows, hidden, s->eps, bf16, 0, threads);
        dscale_linear(normed, w.gate_up, w.gate_up_bias, gate_up, rows, 2 * inner, hidden, bf16, threads);
        dscale_silu_mul(gate_up, gated, rows, inner, bf16, threads);
        dscale_linear(gated, w.down, w.down_bias, added, rows, hidden, inner, bf16, threads);
        const bool last = i + 1 == s->count;
        dscale_norm(added, residual, last ? s->final_norm : s->layers[i + 1].input_norm, last ? b->out : normed, residual,
                    rows, hidden, s->eps, bf16, 0, threads);
        if (tap < b->tap_count && b->tap_layers[tap] == i) {
            char* to = static_cast<char*>(b->taps) + tap * hidden * item;
            for (long r = 0; r < rows; r++)
                std::memcpy(to + r * b->tap_count * hidden * item, residual + r * hidden * item, hidden * item);
            tap++;
        }
    }
}

void dscale_stack(const DscaleStack* s, const DscaleRows* b) {
    dscale::with_team(b->threads, [&] { run_stack(s, b); });
}
}
