"""What the plug-in counts, under the names of serve/metrics.py; SGLang's /metrics shows them with --enable-metrics.

All is known on the host when SGLang has a step's outcome: a step of N requests drafts N · (W - 1) tokens and verifies
N · rows slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

SERIES = {
    "vllm:spec_decode_num_drafts": "Request steps in which drafts were verified.",
    "vllm:spec_decode_num_draft_tokens": "Tokens drafted.",
    "vllm:spec_decode_num_accepted_tokens": "Drafts accepted.",
    "dscale:decode_steps": "Decode steps of the engine.",
    "dscale:request_steps": "Decode steps, counted for each request in them.",
    "dscale:verified_slots": "Rows verified by the target, anchors included.",
    "dscale:verified_draft_tokens": "Drafts verified by the target.",
    "dscale:trimmed_draft_tokens": "Drafts that the policy left unverified.",
}


class Counters:
    """Sums since the start, by name; exported to Prometheus when asked for."""

    def __init__(self, width: int, rows: int, export: bool) -> None:
        self.width, self.rows = width, rows
        self.sums = dict.fromkeys(SERIES, 0)
        self._exported: dict[str, Any] = {}
        if export:
            from prometheus_client import Counter

            self._exported = {name: Counter(name, text) for name, text in SERIES.items()}

    def add(self, accepted: Sequence[int]) -> None:
        """A step in which each request had so many drafts accepted."""
        count = len(accepted)
        for name, value in {
            "vllm:spec_decode_num_drafts": count,
            "vllm:spec_decode_num_draft_tokens": count * (self.width - 1),
            "vllm:spec_decode_num_accepted_tokens": sum(accepted),
            "dscale:decode_steps": 1,
            "dscale:request_steps": count,
            "dscale:verified_slots": count * self.rows,
            "dscale:verified_draft_tokens": count * (self.rows - 1),
            "dscale:trimmed_draft_tokens": count * (self.width - self.rows),
        }.items():
            self.sums[name] += value
            if name in self._exported:
                self._exported[name].inc(value)
