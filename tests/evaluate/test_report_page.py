"""The report in a headless Chromium: narrow, light, dark and printed; nothing is fetched, nothing complains."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright (pip install playwright)")

from dscale.evaluate.report.build import build_report, write_report  # noqa: E402
from tests.evaluate import bench_records, figure_records  # noqa: E402
from tests.serve.test_page import CONTRAST  # noqa: E402


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A report of a benchmark, certificates, the figure experiments and a simulated step."""
    folder = tmp_path_factory.mktemp("report")
    contents = [bench_records.record(speed={"auto": 70.0}), figure_records.certificates(planted=9, exact=False)]
    paths = []
    for one in [*(made.as_json() for made in contents), figure_records.figures(), figure_records.step()]:
        paths.append(folder / f"r{len(paths)}.json")
        paths[-1].write_text(json.dumps(one))
    title = "A name of one word: gpu_beside_prompt_graphs_8b_ours_of_both_kinds.json"
    write_report(build_report(paths, title, resamples=300), folder / "report.html")
    return (folder / "report.html").as_uri()


def opened(browser: Any, address: str, **options: Any) -> Any:
    """The page in a fresh context; asked: every address it fetched, complaints of the console among them."""
    page = browser.new_context(**options).new_page()
    page.asked = []
    page.on("request", lambda request: page.asked.append(request.url))
    page.on("console", lambda message: page.asked.append(message.text))
    page.goto(address)
    return page


@pytest.mark.parametrize("width", [320, 768, 1280])
def test_no_sideways_scrolling_and_nothing_fetched(browser: Any, address: str, width: int) -> None:
    page = opened(browser, address, viewport={"width": width, "height": 800})
    for summary in page.locator("summary").all():
        summary.click()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert [url for url in page.asked if not url.startswith(("file:", "data:"))] == []
    panels = page.locator(".panels > svg")
    assert panels.count() > 8
    assert all(box["width"] >= 280 for box in (panel.bounding_box() for panel in panels.all()))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast_is_enough(browser: Any, address: str, scheme: str) -> None:
    page = opened(browser, address, color_scheme=scheme)
    assert page.evaluate(CONTRAST) == []
    paper, ink = page.evaluate(
        "[getComputedStyle(document.body).backgroundColor,"
        " getComputedStyle(document.querySelector('.panels text')).fill]"
    )
    bright = [sum(map(int, re.findall(r"\d+", one))) for one in (paper, ink)]
    assert (bright[0] > bright[1]) == (scheme == "light")


def test_print_is_on_white_whatever_the_scheme(browser: Any, address: str) -> None:
    page = opened(browser, address, color_scheme="dark")
    assert page.pdf(format="A4").startswith(b"%PDF")
    page.emulate_media(media="print", color_scheme="dark")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    page.set_viewport_size({"width": 700, "height": 1000})
    cut = page.evaluate(
        "[...document.querySelectorAll('table')].filter((t) => t.checkVisibility()"
        " && t.getBoundingClientRect().right > 700).map((t) => t.caption.textContent)"
    )
    assert cut == []


def test_headings_and_captions_lead_through_it(browser: Any, address: str) -> None:
    page = opened(browser, address)
    levels = page.evaluate("[...document.querySelectorAll('h1, h2, h3')].map((h) => +h.tagName[1])")
    assert levels[0] == 1
    assert all(b - a <= 1 for a, b in itertools.pairwise(levels))
    assert page.evaluate("[...document.querySelectorAll('table')].every((t) => t.caption)")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    links = page.locator("nav a").all()
    assert links[-2].text_content() == "What was not measured"
