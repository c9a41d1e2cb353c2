"""The picture in the README: a real run of `dscale demo`, kept as docs/images/demo.svg.

python benchmarks/demo_picture.py docs/images/demo.svg
"""

from __future__ import annotations

import io
import sys
from pathlib import Path

from rich.console import Console

from dscale.cli.demo import build_arms, coloured, run, to_record, to_table
from dscale.config import SamplingParams


def main(out: Path) -> None:
    """Run the demo with its defaults and save what it prints."""
    llms = build_arms("smollm2-135m", "auto", "auto", "auto", 8.0)
    arms, answers = run(llms, SamplingParams(temperature=0.0, max_tokens=128))
    record = to_record("smollm2-135m", llms["off"], arms, answers)
    console = Console(record=True, width=88, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(to_table(record))
    console.print(f"same text: {'yes' if record['same_text'] else 'no'}", style="bold")
    console.print(coloured(llms["dvl"], answers["dvl"][1]))
    console.print("green: drafts that the target accepted; plain: the target's own tokens", style="dim")
    console.save_svg(str(out), title="dscale demo")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
