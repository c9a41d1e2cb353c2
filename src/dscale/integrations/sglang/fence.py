"""What keeps SGLang's host from waiting for the device before it prepares a step.

For DFLASH the scheduler of 0.5.14 calls `verify_done.synchronize()` before it writes the request table: the host
stands still until the step has ended, and then the device waits for what the host does next. The order that this is
for can be had on the device: the scheduler's stream waits for the step, here and (plugin.py) before it prepares any
batch, as SGLang does for every algorithm but DFLASH (0.5.16: for all). A row of the table may be given to a new request
while a step still reads it.
"""

from __future__ import annotations

import torch


class Fence(torch.cuda.Event):
    """An event for which the current stream waits where the host was to."""

    def synchronize(self) -> None:
        """Work given to the current stream from now on comes after what the event recorded."""
        torch.cuda.current_stream().wait_event(self)
