// One token of every sampled row: filters and Gumbel-max, as speculation/sampling.py and noise.py define them.
#include <vector>

#include "common.h"

namespace dscale {
namespace {

constexpr uint64_t mask = (uint64_t(1) << 63) - 1, golden = 0x1E3779B97F4A7C15u;
constexpr float faintest = 1.3e-38f;  // relative weight; what `exponential` clamps lies below
constexpr long block = 256;

DSCALE_INLINE uint64_t mix(uint64_t x) {
    x &= mask;
    x = ((x ^ (x >> 30)) * 0x3F58476D1CE4E5B9u) & mask;
    x = ((x ^ (x >> 27)) * 0x14D049BB133111EBu) & mask;
    return x ^ (x >> 31);
}

DSCALE_INLINE float uniform(uint64_t stream, uint64_t id) {
    const float w = (float(int64_t(mix(stream + id * golden))) + 0.5f) * 0x1p-63f;
    return std::min(w, 1.0f - 0x1p-24f);
}

struct Params {
    float temperature, top_p, min_p;
    int64_t top_k, seed, position;
};

struct Candidate {
    float value, weight;  // logit / temperature; e^(value - peak)
    int64_t id;
};

bool before(const Candidate& a, const Candidate& b) { return a.value > b.value || (a.value == b.value && a.id < b.id); }

// The best of value + noise so far. A token of noise w can only win while w < e^(value - score), because
// -log(-log(1 - w)) ≤ -log w; so the logarithms are taken of few tokens.
struct Best {
    uint64_t stream;
    float peak;
    Candidate token{};
    float score = -INFINITY, bound = INFINITY;

    void offer(const Candidate& c, float w) {
        if (!(w < c.weight * bound)) return;
        const float scored = c.value - std::log(-std::log1p(-w));
        if (scored < score || (scored == score && !before(c, token))) return;
        token = c, score = scored;
        bound = std::exp(peak - score) * 1.001f;
    }

    void offer(const Candidate& c) { offer(c, uniform(stream, uint64_t(c.id))); }
};

// Moves to the front, in any order, the beginning that both limits keep: a token stays while fewer than `count` tokens
// and less than `mass` of weight precede it. Returns its length, at least 1.
long keep(Candidate* tokens, long size, long count, double mass) {
    long known = 0, end = size;  // the token at `known` stays, the one at `end` does not
    double preceding = 0;
    while (end - known > 1) {
        const long middle = known + (end - known) / 2;
        std::nth_element(tokens + known, tokens + middle, tokens + end, before);
        double more = 0;
        for (long i = known; i < middle; i++) more += tokens[i].weight;
        if (middle < count && preceding + more < mass) known = middle, preceding += more;
        else end = middle;
    }
    return end;
}

struct Row {
    std::vector<float> value, weight;
    std::vector<Candidate> candidates;
    float peak = 0;
    long size = 0;

    // value = x / temperature, weight = e^(value - peak).
    template <class T>
    void read(const T* x, long count, float temperature) {
        size = count;
        value.resize(divide_up(size, block) * block), weight.resize(value.size());
        Floats top = fill(-INFINITY);
        for (long i = 0; i < size; i += lanes) {
            const Floats v = load_upto(x + i, size - i) / temperature;
            store(&value[i], v);
            if (size - i >= lanes) top = maximum(v, top);
        }
        peak = largest(top);
        for (long i = size / lanes * lanes; i < size; i++) peak = std::max(peak, value[i]);
        std::fill(value.begin() + size, value.end(), -INFINITY);
        for (size_t i = 0; i < value.size(); i += lanes) store(&weight[i], exponential(load(&value[i]) - peak));
    }

    double mass(float floor) const {
        double total = 0;
        for (size_t i = 0; i < value.size(); i += block) {
            Floats part = {};
            for (long j = 0; j < block; j += lanes) {
                const Floats w = load(&weight[i + j]);
                part += w >= fill(floor) ? w : Floats{};
            }
            total += sum(part);
        }
        return total;
    }

    void collect(float least) {
        candidates.clear();
        for (long i = 0; i < size; i += 4 * lanes) {  // the arrays are padded to whole blocks
            const float* w = &weight[i];
            const Floats pair = maximum(load(w), load(w + lanes));
            const Floats other = maximum(load(w + 2 * lanes), load(w + 3 * lanes));
            if (largest(maximum(pair, other)) < least) continue;
            for (long j = i; j < i + 4 * lanes; j++)
                if (weight[j] >= least) candidates.push_back({value[j], weight[j], j});
        }
    }

    long likeliest() const {
        for (long i = 0; i < size; i++)
            if (value[i] == peak) return i;
        return 0;
    }

    int64_t draw_any(Best best) const {
        const long first = likeliest();
        best.offer({value[first], weight[first], first});
        float w[block];
        for (size_t i = 0; i < value.size(); i += block) {
            for (long j = 0; j < block; j++) w[j] = uniform(best.stream, i + j);
            for (long j = 0; j < block; j++)
                if (w[j] < weight[i + j] * best.bound) best.offer({value[i + j], weight[i + j], long(i) + j}, w[j]);
        }
        return best.token.id;
    }

    // Tries the tokens near the peak first; they suffice when a limit ends the beginning among them.
    int64_t draw_filtered(Best best, const Params& p) {
        const float floor = std::max(p.min_p, faintest);
        const double whole = p.top_p < 1 && p.top_k == 0 ? mass(floor) : 0;
        for (const float near : {1e-4f, 1e-7f, 0.0f}) {
            const float least = std::max(floor, near);
            collect(least);
            long kept = long(candidates.size());
            if (p.top_k > 0) kept = keep(candidates.data(), kept, p.top_k, INFINITY);
            const bool reached = kept == p.top_k;
            if (p.top_p < 1) {
                double total = whole;
                if (p.top_k > 0)
                    for (long i = 0; i < kept; i++) total += candidates[i].weight;
                kept = keep(candidates.data(), kept, kept, double(p.top_p) * total);
            }
            if (least > floor && !(p.top_k > 0 ? reached : kept < long(candidates.size()))) continue;
            for (long i = 0; i < kept; i++) best.offer(candidates[i]);
            break;
        }
        return best.token.id;
    }
};

template <class T>
void draw(const T* x, const float* temperature, const int64_t* top_k, const float* top_p, const float* min_p,
          const int64_t* seed, const int64_t* position, int64_t* ids, long rows, long size, long threads) {
    parallel_for(rows, threads, [&](long r) {
        const Params p{temperature[r], top_p[r], min_p[r], top_k[r], seed[r], position[r]};
        if (!(p.temperature > 0)) return;
        thread_local Row row;
        row.read(x + r * size, size, p.temperature);
        const Best best{mix(mix(uint64_t(p.seed)) + uint64_t(p.position) * golden), row.peak};
        const bool any = p.top_k == 0 && p.top_p >= 1 && p.min_p <= 0;
        ids[r] = any ? row.draw_any(best) : row.draw_filtered(best, p);
    });
}

}  // namespace
}  // namespace dscale

using namespace dscale;

extern "C" {

// Tokens [rows] of the rows whose temperature is above 0; the other ids stay as they are.
void dscale_draw(const void* x, const float* temperature, const int64_t* top_k, const float* top_p, const float* min_p,
                 const int64_t* seed, const int64_t* position, int64_t* ids, long rows, long size, int bf16,
                 long threads) {
    if (bf16) draw((const bfloat16*)x, temperature, top_k, top_p, min_p, seed, position, ids, rows, size, threads);
    else draw((const float*)x, temperature, top_k, top_p, min_p, seed, position, ids, rows, size, threads);
}
}
