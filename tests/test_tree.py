"""What is tracked stays small."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LIMIT = 45_000_000  # bytes


def tracked() -> dict[str, int]:
    """Bytes of every tracked file that is there; the test is skipped outside a checkout."""
    try:
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no git, or no checkout")
    paths = [ROOT / name.decode() for name in listed.split(b"\0") if name]
    return {str(path.relative_to(ROOT)): path.stat().st_size for path in paths if path.is_file()}


def test_the_tree_is_under_its_limit() -> None:
    """A checkout is copied whole to every machine that runs something, so it may not grow with each record. The shipped
    drafter takes 38.7 MB; code, pages, pictures and records share the rest. A record that does not fit: .json.gz."""
    sizes = tracked()
    largest = sorted(sizes.items(), key=lambda one: -one[1])[:12]
    told = "\n".join(f"{size:>10,} {name}" for name, size in largest)
    assert sum(sizes.values()) < LIMIT, f"the largest files:\n{told}"
