"""What a server does once it has loaded."""

from __future__ import annotations

import gc

from dscale.serve.garbage import keep_out_of_collections


def test_what_is_loaded_is_not_looked_through_again() -> None:
    there = len(gc.get_objects())
    try:
        keep_out_of_collections()
        assert gc.get_freeze_count() > 0.9 * there
        assert len(gc.get_objects()) < 0.1 * there
    finally:
        gc.unfreeze()
