"""The tiny model folders of the command tests, for the server."""

from __future__ import annotations

from tests.cli.test_commands import folders

__all__ = ["folders"]
