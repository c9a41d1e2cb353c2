"""The latest verifications of live traffic, in bounded memory: what a refit learns from."""

from __future__ import annotations

from collections import deque

import numpy as np

from dscale.engine.recorder import RequestTrace
from dscale.train.traces import Traces, of_request

WORKLOADS = ("live",)


class RecentTraces:
    """At most `most` records, whole requests of the past going first. add is a recorder's `done`.

    fresh: records since the last `take`.
    """

    def __init__(self, groups: tuple[str, ...], most: int) -> None:
        self.groups, self.most = groups, most
        self.fresh = 0
        self._kept: deque[Traces] = deque()
        self._records = 0
        self._numbered = 0

    def __len__(self) -> int:
        return self._records

    @property
    def prompts(self) -> int:
        """Different prompts among the records."""
        return len({int(one.prompt[0]) for one in self._kept})

    def add(self, trace: RequestTrace) -> None:
        """Take in a request that ended; of one longer than all that is kept, its last steps."""
        traces = of_request(trace, self._numbered, 0, self.groups, WORKLOADS)
        self._numbered = (self._numbered + 1) % (1 << 31)
        if len(traces) > self.most:
            traces = traces.select(np.arange(len(traces) - self.most, len(traces)))
        self._kept.append(traces)
        self._records += len(traces)
        self.fresh += len(traces)
        while self._records > self.most:
            self._records -= len(self._kept.popleft())

    def take(self) -> list[Traces]:
        """Everything that is kept, oldest first; it stays here. The arrays are shared and must not be changed."""
        self.fresh = 0
        return list(self._kept)
