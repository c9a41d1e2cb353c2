"""Which tokens may follow which so that a text's bytes are UTF-8. A grammar's classes of characters are wider: they let
through surrogates and overlong forms, which decode to several U+FFFD and break lengths.

The second byte after these leads is narrower than 80…BF (Unicode 16, table 3-7); all else the bytes' kinds decide:
    E0 → A0…BF    ED → 80…9F    F0 → 90…BF    F4 → 80…8F
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SECOND = {0xE0: (0xA0, 0xBF), 0xED: (0x80, 0x9F), 0xF0: (0x90, 0xBF), 0xF4: (0x80, 0x8F)}


def could_be_utf8(token: bytes) -> bool:
    """True when the token may stand somewhere in UTF-8: it may begin and end inside a character."""
    if re.search(b"\xed[\xa0-\xbf]", token):  # a surrogate, which Python's decoder sees only when it is whole
        return False
    start = 0
    while start < min(len(token), 3) and 0x80 <= token[start] < 0xC0:
        start += 1
    try:
        codecs.getincrementaldecoder("utf-8")().decode(token[start:])
    except UnicodeDecodeError:
        return False
    return True


@dataclass(frozen=True)
class Joins:
    """leads: tokens that end with one of the four lead bytes, and that byte; after: what may follow such a byte, a mask
    of packed words int32 [⌈V/32⌉]."""

    leads: dict[int, int]
    after: dict[int, Tensor]

    @classmethod
    def of(cls, tokens: Sequence[bytes]) -> Joins:
        """For the bytes of every token of the vocabulary."""
        leads = {id: token[-1] for id, token in enumerate(tokens) if token and token[-1] in SECOND}
        first = torch.tensor([token[0] if token else 0 for token in tokens] + [0] * (-len(tokens) % 32))
        bits = 1 << torch.arange(32)
        after = {}
        for lead in set(leads.values()):
            low, high = SECOND[lead]
            packed = (((first >= low) & (first <= high)).view(-1, 32) * bits).sum(-1)
            after[lead] = torch.where(packed >= 1 << 31, packed - (1 << 32), packed).int()
        return cls(leads, after)

    def restrict(self, words: Tensor, before: int | None) -> None:
        """Take from a row's mask, in place, what cannot follow the token before."""
        lead = self.leads.get(before) if before is not None else None
        if lead is not None:
            words &= self.after[lead]
