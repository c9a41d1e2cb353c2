// Parallel loops on the threads of the OpenMP runtime that torch has loaded.
//
// Items of a loop are claimed one by one. Within `with_team` the threads stay together over many loops, and a loop waits
// for the items that another thread has claimed, not for the thread: one that the system has put aside holds up nothing.
#pragma once

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace dscale {

// How threads are started: GOMP_parallel of that runtime, or null for one thread.
typedef void (*Launch)(void (*)(void*), void*, unsigned, unsigned);
extern Launch launch;

// Wait a moment; after many, let others run.
struct Patience {
    int turns = 0;

    void wait() {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        asm volatile("yield");
#endif
        if (++turns % 4096 == 0) sched_yield();
    }
};

class Team {
public:
    // call(body, 0) … call(body, count - 1), each once, by whoever claims it; returns when all are done.
    void loop(long count, void (*call)(const void*, long), const void* body) {
        size_ = count, call_ = call, body_ = body;
        finished_.store(0, std::memory_order_relaxed);
        const uint64_t turn = (open_.load(std::memory_order_relaxed) >> 32) + 1;
        open_.store(turn << 32 | uint64_t(count), std::memory_order_release);
        while (claim()) {}
        for (Patience patience; finished_.load(std::memory_order_acquire) < count;) patience.wait();
    }

    // Take part in loops until the team is dissolved.
    void serve() {
        for (Patience patience; !dissolved_.load(std::memory_order_acquire);)
            if (claim()) patience = {};
            else patience.wait();
    }

    void dissolve() { dissolved_.store(true, std::memory_order_release); }

private:
    // The loop's fields are read after its claim has succeeded: from then on the loop cannot end without this item.
    bool claim() {
        uint64_t seen = open_.load(std::memory_order_acquire);
        do {
            if (!(seen & 0xffffffffu)) return false;
        } while (!open_.compare_exchange_weak(seen, seen - 1, std::memory_order_acquire));
        call_(body_, size_ - long(seen & 0xffffffffu));
        finished_.fetch_add(1, std::memory_order_release);
        return true;
    }

    alignas(64) std::atomic<uint64_t> open_{0};  // turn of the loop, and how many of its items are unclaimed
    alignas(64) std::atomic<long> finished_{0};
    std::atomic<bool> dissolved_{false};
    long size_ = 0;
    void (*call_)(const void*, long) = nullptr;
    const void* body_ = nullptr;
};

extern thread_local Team* team;  // of the thread that leads one, else null

// Run body on this thread with up to `threads` threads at hand for its loops.
template <class Body>
inline void with_team(long threads, const Body& body) {
    if (threads <= 1 || !launch || team) return body();
    struct Start {
        Team team;
        const Body* body;
    } start{{}, &body};
    team = &start.team;
    launch(
        [](void* argument) {
            Start& start = *static_cast<Start*>(argument);
            if (team != &start.team) return start.team.serve();
            (*start.body)();
            start.team.dissolve();
        },
        &start, unsigned(threads), 0);
    team = nullptr;
}

// body(0) … body(count - 1) on up to `threads` threads.
template <class Body>
inline void parallel_for(long count, long threads, const Body& body) {
    if (count <= 1 || threads <= 1 || !launch) {
        for (long i = 0; i < count; i++) body(i);
        return;
    }
    with_team(std::min(threads, count), [&] {
        team->loop(count, [](const void* body, long i) { (*static_cast<const Body*>(body))(i); }, &body);
    });
}

// body(first, last) over runs of at most `step` of 0 … count - 1. Each thread walks through a share of its own from front
// to back, as caches like it, and then helps with what is left of the others'.
template <class Body>
inline void parallel_ranges(long count, long step, long threads, const Body& body) {
    constexpr long most = 64;
    threads = std::min({threads, count, most});
    if (threads <= 1 || !launch) return body(0L, count);
    struct alignas(64) Share {
        std::atomic<long> next;
        long end;
    } shares[most];
    for (long i = 0; i < threads; i++) shares[i].next = count * i / threads, shares[i].end = count * (i + 1) / threads;
    parallel_for(threads, threads, [&](long own) {
        for (long turn = 0; turn < threads; turn++) {
            Share& share = shares[(own + turn) % threads];
            for (long first; (first = share.next.fetch_add(step, std::memory_order_relaxed)) < share.end;)
                body(first, std::min(first + step, share.end));
        }
    });
}

// body(first, last) over slices of 0 … count - 1 of about `grain` rows' work each; one slice when there is little work.
template <class Body>
inline void parallel_slices(long count, long grain, long threads, const Body& body) {
    grain = std::max(grain, 1L);
    const long slices = std::min((count + grain - 1) / grain, 4 * threads);
    if (slices <= 1 || threads <= 1) return body(0L, count);
    parallel_for(slices, threads, [&](long s) { body(count * s / slices, count * (s + 1) / slices); });
}

}  // namespace dscale
