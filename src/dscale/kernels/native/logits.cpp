// One pass over each row of logits: the first largest, or the sixteen largest with log-sum-exp and entropy.
#include "common.h"

namespace dscale {
namespace {

constexpr long top = 16;

// Whether any lane of the block is above the bound.
DSCALE_INLINE bool above(Floats x, float bound) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(bound), _CMP_GT_OQ) != 0;
#else
    const Words over = (Words)(x > fill(bound));
    uint32_t any = 0;
    for (int i = 0; i < lanes; i++) any |= over[i];
    return any != 0;
#endif
}

template <class T>
int64_t first_largest(const T* x, long size) {
    float best = -INFINITY;
    int64_t index = 0;
    long i = 0;
    for (; i + 4 * lanes <= size; i += 4 * lanes) {
        const Floats pair = maximum(load(x + i), load(x + i + lanes));
        const Floats other = maximum(load(x + i + 2 * lanes), load(x + i + 3 * lanes));
        if (!above(maximum(pair, other), best)) continue;
        for (long j = i; j < i + 4 * lanes; j++)
            if (scalar(x[j]) > best) best = scalar(x[j]), index = j;
    }
    for (; i < size; i++)
        if (scalar(x[i]) > best) best = scalar(x[i]), index = i;
    return index;
}

// Sixteen largest, in falling order, the lower index first among equals.
struct Largest {
    float values[top];
    int64_t ids[top];

    Largest() {
        std::fill(values, values + top, -INFINITY);
        std::fill(ids, ids + top, 0);
    }

    void offer(float value, int64_t id) {
        if (!(value > values[top - 1])) return;
        long at = top - 1;
        for (; at > 0 && values[at - 1] < value; at--) values[at] = values[at - 1], ids[at] = ids[at - 1];
        values[at] = value, ids[at] = id;
    }
};

template <class T>
Largest sixteen_largest(const T* x, long size) {
    Largest largest;
    for (long i = 0; i < size; i += lanes) {
        const long count = std::min<long>(lanes, size - i);
        if (count == lanes && !above(load(x + i), largest.values[top - 1])) continue;
        for (long j = i; j < i + count; j++) largest.offer(scalar(x[j]), j);
    }
    return largest;
}

// log Σ e^x and the entropy of softmax(x), given the largest x.
template <class T>
void partition(const T* x, long size, float peak, float* log_sum, float* entropy) {
    Floats total[2] = {}, weighted[2] = {};
    long i = 0;
    for (int turn = 0; i + lanes <= size; i += lanes, turn ^= 1) {
        const Floats shifted = maximum(load(x + i) - peak, fill(-87.0f)), e = exponential(shifted);
        total[turn] += e;
        weighted[turn] += e * shifted;
    }
    double sums = sum(total[0] + total[1]), products = sum(weighted[0] + weighted[1]);
    for (; i < size; i++) {
        const float shifted = std::max(scalar(x[i]) - peak, -87.0f), e = std::exp(shifted);
        sums += e, products += e * shifted;
    }
    *log_sum = float(peak + std::log(sums));
    *entropy = float(std::log(sums) - products / sums);
}

template <class T>
void top_logits(const T* x, float* values, int64_t* ids, float* log_sum, float* entropy, long rows, long size,
                long threads) {
    parallel_for(rows, threads, [&](long r) {
        const Largest largest = sixteen_largest(x + r * size, size);
        std::copy(largest.values, largest.values + top, values + r * top);
        std::copy(largest.ids, largest.ids + top, ids + r * top);
        partition(x + r * size, size, largest.values[0], log_sum + r, entropy + r);
    });
}

template <class T>
void argmax(const T* x, int64_t* ids, long rows, long size, long threads) {
    parallel_for(rows, threads, [&](long r) { ids[r] = first_largest(x + r * size, size); });
}

}  // namespace
}  // namespace dscale

using namespace dscale;

extern "C" {

void dscale_argmax(const void* x, int64_t* ids, long rows, long size, int bf16, long threads) {
    if (bf16) argmax((const bfloat16*)x, ids, rows, size, threads);
    else argmax((const float*)x, ids, rows, size, threads);
}

void dscale_top_logits(const void* x, float* values, int64_t* ids, float* log_sum, float* entropy, long rows, long size,
                       int bf16, long threads) {
    if (bf16) top_logits((const bfloat16*)x, values, ids, log_sum, entropy, rows, size, threads);
    else top_logits((const float*)x, values, ids, log_sum, entropy, rows, size, threads);
}
}
