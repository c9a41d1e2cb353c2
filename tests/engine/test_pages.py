"""The page pool: references, prefix sharing, eviction; nothing leaks under random use."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from dscale.config import CacheConfig
from dscale.engine.pages import SCRATCH_PAGE, PagePool, page_hash, pages_for


def test_pages_for_rounds_up():
    assert [pages_for(n) for n in (0, 1, 16, 17, 32, 33)] == [0, 1, 1, 2, 2, 3]


def test_digest_depends_on_everything_before():
    first = page_hash(b"", [1] * 16)
    assert page_hash(first, [2] * 16) != page_hash(b"", [2] * 16)
    assert page_hash(first, [2] * 16) == page_hash(page_hash(b"", [1] * 16), [2] * 16)


def test_take_is_all_or_nothing_and_never_gives_scratch():
    pool = PagePool(CacheConfig(5))
    assert pool.take(5) is None
    assert pool.available == 4
    pages = pool.take(4)
    assert pages is not None
    assert sorted(pages) == [1, 2, 3, 4]
    assert SCRATCH_PAGE not in pages


def test_published_page_is_shared_and_survives_release():
    pool = PagePool(CacheConfig(4))
    (page,) = pool.take(1) or []
    digest = page_hash(b"", range(16))
    pool.publish(page, digest)
    pool.release([page])
    assert pool.available == 3
    assert pool.match([digest]) == [page]
    assert pool.match([digest]) == [page]  # a second reader of the same page
    assert pool.available == 2
    pool.release([page])
    assert pool.available == 2  # still read by the other
    pool.release([page])
    assert pool.available == 3


def test_match_stops_at_the_first_unknown_page():
    pool = PagePool(CacheConfig(4))
    pages = pool.take(2) or []
    digests = [page_hash(b"", [i] * 16) for i in range(3)]
    pool.publish(pages[0], digests[0])
    pool.publish(pages[1], digests[2])
    assert pool.match(digests) == [pages[0]]


def test_oldest_idle_page_is_evicted_first_and_forgotten():
    pool = PagePool(CacheConfig(3))
    first, second = (pool.take(1) or [])[0], (pool.take(1) or [])[0]
    digests = [page_hash(b"", [i] * 16) for i in range(2)]
    pool.publish(first, digests[0])
    pool.publish(second, digests[1])
    pool.release([first])
    pool.release([second])
    assert pool.take(1) == [first]
    assert pool.match([digests[0]]) == []
    assert pool.match([digests[1]]) == [second]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_random_use_leaks_no_page(seed: int):
    rng = random.Random(seed)
    pool = PagePool(CacheConfig(rng.randint(2, 20)))
    held: list[list[int]] = []
    for _ in range(200):
        action = rng.random()
        if action < 0.5:
            digests = [page_hash(b"", [rng.randint(0, 5)] * 16) for _ in range(rng.randint(0, 3))]
            hits = pool.match(digests)
            fresh = pool.take(rng.randint(0, 3))
            if fresh is None:
                pool.release(hits)
                continue
            for page in fresh:
                if rng.random() < 0.5:
                    pool.publish(page, page_hash(b"", [rng.randint(0, 5)] * 16))
            held.append(hits + fresh)
        elif held:
            pool.release(held.pop(rng.randrange(len(held))))
        distinct = {page for pages in held for page in pages}
        assert pool.held == len(distinct)
        assert SCRATCH_PAGE not in distinct
    for pages in held:
        pool.release(pages)
    assert pool.available == pool.capacity
    pool.clear_cached()
    assert sorted(pool.take(pool.capacity) or []) == list(range(1, pool.capacity + 1))
