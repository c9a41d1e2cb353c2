"""Pictures of a report for the docs: its head, or one section, in a headless Chromium.

    python benchmarks/report_picture.py report.html docs/images/report.png
    python benchmarks/report_picture.py report.html docs/images/report-phone.png --section Headline --width 390 --dark

Needs playwright; the browser is $CHROMIUM, one on the path, or playwright's own.
"""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path

from playwright.sync_api import sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--section", default=None, help="begin at the section whose title begins so")
    parser.add_argument("--width", type=int, default=1100)
    parser.add_argument("--height", type=int, default=900)
    parser.add_argument("--dark", action="store_true")
    args = parser.parse_args()
    browser_path = os.environ.get("CHROMIUM") or next((path for name in NAMES if (path := shutil.which(name))), None)
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        page = browser.new_context(
            viewport={"width": args.width, "height": args.height},
            color_scheme="dark" if args.dark else "light",
            reduced_motion="reduce",
        ).new_page()
        page.goto(args.report.resolve().as_uri())
        if args.section:
            page.locator("h2", has_text=args.section).first.evaluate("(heading) => heading.scrollIntoView()")
        page.screenshot(path=args.picture)
        browser.close()


if __name__ == "__main__":
    main()
