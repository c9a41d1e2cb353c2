"""Pages of the cache: who holds which, which full pages can be shared by prefix, and what is free.

Target and draft keys of a token have the same slot, so one page number stands for both caches (dflash.md, Caches).
Pure Python: no tensor is touched here. Page 0 is scratch: sentinel rows write there and nobody reads it.
"""

from __future__ import annotations

import hashlib
import struct
from collections import OrderedDict
from collections.abc import Sequence

from dscale.config import PAGE_SIZE, CacheConfig

SCRATCH_PAGE = 0
PAGE_BYTES = struct.Struct(f"{PAGE_SIZE}q").pack


def page_hash(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Digest of one full page of tokens after everything before it (parent is the previous page's digest or b"")."""
    return hashlib.blake2b(parent + PAGE_BYTES(*tokens), digest_size=16).digest()


class PagePool:
    """Reference-counted pages. A full page may carry a digest; unreferenced, it stays reusable until it is evicted."""

    def __init__(self, config: CacheConfig) -> None:
        self.config = config
        self._free = list(range(config.num_pages - 1, SCRATCH_PAGE, -1))
        self._references = [0] * config.num_pages
        self._digest_of: list[bytes | None] = [None] * config.num_pages
        self._page_of: dict[bytes, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # unreferenced pages with a digest, oldest first

    @property
    def capacity(self) -> int:
        """Pages that requests can hold at most."""
        return self.config.num_pages - 1

    @property
    def available(self) -> int:
        """Pages that can be taken now: free ones and idle cached ones."""
        return len(self._free) + len(self._idle)

    @property
    def held(self) -> int:
        """Pages some request refers to."""
        return self.capacity - self.available

    def take(self, count: int) -> list[int] | None:
        """`count` fresh pages, each with one reference, or None (and nothing taken) when there are not that many."""
        if count > self.available:
            return None
        return [self._take_one() for _ in range(count)]

    def _take_one(self) -> int:
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._idle.popitem(last=False)
            digest = self._digest_of[page]
            assert digest is not None
            del self._page_of[digest]
            self._digest_of[page] = None
        self._references[page] = 1
        return page

    def match(self, digests: Sequence[bytes]) -> list[int]:
        """Pages of the longest cached prefix of these page digests, a reference added to each."""
        pages: list[int] = []
        for digest in digests:
            page = self._page_of.get(digest)
            if page is None:
                break
            self._idle.pop(page, None)
            self._references[page] += 1
            pages.append(page)
        return pages

    def publish(self, page: int, digest: bytes) -> None:
        """Let later requests find this full, committed page. A digest already known keeps its first page."""
        if self.config.prefix_caching and digest not in self._page_of and self._digest_of[page] is None:
            self._page_of[digest] = page
            self._digest_of[page] = digest

    def release(self, pages: Sequence[int]) -> None:
        """Drop one reference from each page; last pages of a prefix are evicted first."""
        for page in reversed(pages):
            self._references[page] -= 1
            assert self._references[page] >= 0, f"page {page} released more often than taken"
            if self._references[page] == 0:
                if self._digest_of[page] is None:
                    self._free.append(page)
                else:
                    self._idle[page] = None

    def clear_cached(self) -> None:
        """Forget every idle cached page."""
        while self._idle:
            page, _ = self._idle.popitem()
            digest = self._digest_of[page]
            assert digest is not None
            del self._page_of[digest]
            self._digest_of[page] = None
            self._free.append(page)


def pages_for(tokens: int) -> int:
    """Pages that hold this many tokens."""
    return -(-tokens // PAGE_SIZE)
