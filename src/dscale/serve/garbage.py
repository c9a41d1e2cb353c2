"""What the garbage collector need not look at in a process that serves."""

from __future__ import annotations

import gc


def keep_out_of_collections() -> None:
    """Let the garbage collector leave alone what is there now: it lives as long as the process.

    To look through it, as it would every few seconds under load, holds up all streams for a quarter of a second.
    """
    gc.collect()
    gc.freeze()
