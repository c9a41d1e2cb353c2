"""The page in a headless Chromium, against page_stub: what a user does, narrow, dark, by keyboard, no errors."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright (pip install playwright)")
uvicorn = pytest.importorskip("uvicorn", reason="needs the extra `serve`")

from tests.conftest import browser_path  # noqa: E402
from tests.serve.page_stub import PAGE, TEXTS, create_app  # noqa: E402

QUESTION = "Why is the sky blue?"


@contextmanager
def serving(**options: Any) -> Iterator[str]:
    """The stub on a free port of the loopback interface; yields its address."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        config = uvicorn.Config(create_app(**options), log_level="critical", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        deadline = time.monotonic() + 20
        while not server.started and time.monotonic() < deadline:
            time.sleep(0.02)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
        server.force_exit = server.should_exit = True
        thread.join(10)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with serving() as url:
        yield url


@contextmanager
def opened(browser: Any, url: str, complaints: list[str] | None = None, **options: Any) -> Iterator[Any]:
    """A page of a fresh context, connected; fails on console errors unless a list collects them."""
    context = browser.new_context(**options)
    page = context.new_page()
    page.set_default_timeout(30_000)
    found: list[str] = [] if complaints is None else complaints
    page.on("console", lambda message: found.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: found.append(str(error)))
    page.goto(url)
    if complaints is None:
        page.wait_for_selector("#connection.live")
    yield page
    context.close()
    if complaints is None:
        assert found == []


def ask(page: Any, text: str = QUESTION, others: int = 0) -> None:
    page.evaluate("(count) => { document.querySelector('#others').value = count; }", str(others))
    page.fill("#prompt", text)
    page.click("#send")


def wait_for_answer(page: Any, number: int = 1) -> str:
    page.wait_for_selector(f".assistant:not(.streaming) .stats:not(:empty) >> nth={number - 1}")
    return page.text_content(f".assistant .text >> nth={number - 1}")


WATCH_PROGRESS = """() => {
    window.seen = [];
    const shown = document.querySelector("#progress");
    const note = () => window.seen.push(shown.textContent);
    new MutationObserver(note).observe(shown, { childList: true, characterData: true, subtree: true });
}"""


def test_a_chat_streams_with_its_drafts_tinted_and_the_strip_moving(browser: Any) -> None:
    """The answer waits in its middle until all that shows only while it streams has been seen."""
    with serving(held=True) as url, opened(browser, url) as page:
        page.wait_for_function("() => document.querySelector('#model').textContent == 'smollm2-135m · cpu · bfloat16'")
        strip = page.get_attribute("#strip", "aria-label")
        assert strip == "Nothing is being decoded"
        page.evaluate(WATCH_PROGRESS)
        ask(page, others=7)
        page.wait_for_selector(".assistant.streaming .step b")
        early = len(page.text_content(".assistant .text"))
        page.wait_for_function("() => document.querySelector('#strip').ariaLabel.startsWith('8 requests')")
        label = page.get_attribute("#strip", "aria-label")
        requests, rows, accepted, rejected, trimmed = map(int, re.findall(r"\d+", label))
        assert requests == 8
        assert accepted + rejected + trimmed == 7 * requests  # every draft is one of them
        assert rows == requests + accepted + rejected
        before = page.evaluate("document.querySelector('#strip').toDataURL()")
        page.wait_for_function("(before) => document.querySelector('#strip').toDataURL() != before", arg=before)
        httpx.post(f"{url}stub/release")
        text = wait_for_answer(page)
        assert early < len(text)
        assert text == "".join(TEXTS)
        assert page.locator(".assistant .step").count() > 5
        assert f"{len(TEXTS)} tokens" in page.text_content(".assistant .stats")
        page.wait_for_function("() => seen.some((text) => Number(text) >= 1)")  # told of each second that had steps
        page.wait_for_function("() => document.querySelectorAll('#latency td')[3].textContent != '–'")  # from /metrics


def test_details_of_a_step_by_pointer(browser: Any, address: str) -> None:
    with opened(browser, address) as page:
        ask(page)
        wait_for_answer(page)
        page.hover(".assistant .step >> nth=2")
        tip = page.text_content("#tip")
        drafted, verified, accepted, emitted = map(
            int, re.search(r"(\d+) drafted, (\d+) verified, (\d+) accepted: (\d+) token", tip).groups()
        )
        assert drafted == 7
        assert accepted <= verified <= drafted
        assert emitted == accepted + 1
        step = page.locator(".assistant .step >> nth=2")
        assert step.locator("b").count() == accepted


def test_with_the_real_app_on_a_tiny_engine(browser: Any) -> None:
    """One token a byte, so that many characters are of several tokens: the text must be the API's all the same."""
    from tests.serve.inprocess import InProcess, live, service_of, tiny_llm

    client = InProcess(tiny_llm("full"))
    with live(service_of(client)) as url, opened(browser, f"{url}/") as page:
        page.wait_for_function("() => document.querySelector('#model').textContent.startsWith('tiny')")
        assert "script-src 'self'" in httpx.get(url).headers["content-security-policy"]
        ask(page, others=3)
        shown = wait_for_answer(page)
        body = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 256}
        plain = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()
        assert shown == plain["choices"][0]["message"]["content"]
        assert f"{plain['usage']['completion_tokens']} tokens" in page.text_content(".assistant .stats")
        page.hover(".assistant .step >> nth=0")
        assert re.search(r"drafted, \d+ verified, \d+ accepted", page.text_content("#tip"))
        page.select_option("#policy", "off")
        page.click("#policy-form button")
        page.wait_for_function("() => document.querySelector('#policy-status').textContent == 'off is in force'")
        ask(page, "again")
        wait_for_answer(page, 2)
        page.wait_for_function("() => document.querySelector('#budget').textContent == '1.0'")
    client.stop()


def test_without_step_records_the_chat_is_plain(browser: Any) -> None:
    with serving(steps=False) as url, opened(browser, url) as page:
        ask(page)
        assert wait_for_answer(page) == "".join(TEXTS)
        assert page.locator(".assistant .step").count() == 0


def test_the_policy_is_switched_and_marked(browser: Any, address: str) -> None:
    with opened(browser, address) as page:
        page.wait_for_function("() => document.querySelector('#policy').value == 'dvl'")
        assert page.is_visible("#slots-label")
        page.select_option("#policy", "full")
        assert not page.is_visible("#slots-label")
        page.click("#policy-form button")
        page.wait_for_function("() => document.querySelector('#budget').textContent == '8.0'")
        assert page.text_content("#policy-status") == "full is in force"
        page.select_option("#policy", "dvl")
        page.fill("#slots", "5")
        page.click("#policy-form button")
        page.wait_for_function("() => document.querySelector('#budget').textContent == '5.0'")


def test_the_policy_can_be_switched_under_load(browser: Any, address: str) -> None:
    """A browser opens six connections to a server at most; the page must not need more."""
    with opened(browser, address) as page:
        ask(page, others=15)
        page.wait_for_selector(".assistant.streaming .step")
        page.select_option("#policy", "off")
        page.click("#policy-form button")
        page.wait_for_function("() => document.querySelector('#budget').textContent == '1.0'")
        page.wait_for_function("() => document.querySelector('#strip').ariaLabel.startsWith('16 requests; 16 rows')")
        page.select_option("#policy", "dvl")
        page.click("#policy-form button")
        wait_for_answer(page)
        page.wait_for_function("() => document.querySelector('#running').textContent == '0'")  # the others ended too


def test_policies_that_need_what_is_not_loaded_cannot_be_chosen(browser: Any) -> None:
    with serving(predictor=False) as url, opened(browser, url) as page:
        page.wait_for_function("() => document.querySelector('#model').textContent != ''")
        states = page.evaluate("[...document.querySelectorAll('#policy option')].map((o) => [o.value, o.disabled])")
        assert [name for name, disabled in states if disabled] == ["dvl"]


def test_a_policy_that_is_refused_says_why(browser: Any, address: str) -> None:
    complaints: list[str] = []
    with opened(browser, address, complaints) as page:
        page.wait_for_function("() => document.querySelector('#policy').value == 'dvl'")
        page.select_option("#policy", "fixed:4")
        page.click("#policy-form button")
        page.wait_for_selector("#policy-status.bad")
        assert page.text_content("#policy-status") == "policy: fixed:4 cannot be taken now"
        assert page.input_value("#policy") == "dvl"
    assert len(complaints) == 1  # the browser's own line about the status 400


def test_keyboard_only(browser: Any, address: str) -> None:
    with opened(browser, address) as page:
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.className") == "skip"
        page.keyboard.press("Enter")
        page.keyboard.type("Hello")
        page.keyboard.press("Shift+Enter")
        page.keyboard.type(QUESTION)
        page.keyboard.press("Enter")
        assert page.text_content(".user .text") == f"Hello\n{QUESTION}"
        page.wait_for_selector(".assistant .step >> nth=3")
        page.keyboard.press("Escape")
        wait_for_answer(page)
        assert page.text_content(".assistant .stats").startswith("stopped")
        page.keyboard.press("Shift+Tab")
        assert page.evaluate("document.activeElement.className") == "text"
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowRight")
        assert page.text_content("#tip").startswith("Step 2 of ")
        assert "Step 2 of " in page.text_content("#announce")
        outline = "getComputedStyle(document.activeElement).outlineStyle"
        for _ in range(12):  # every stop is visible
            page.keyboard.press("Tab")
            here = page.evaluate("document.activeElement.outerHTML.slice(0, 60)")
            assert page.evaluate(outline) != "none" or here.startswith(("<body", '<textarea id="prompt"')), here


@pytest.mark.parametrize("width", [320, 360, 768])
def test_narrow_screens_do_not_scroll_sideways(browser: Any, address: str, width: int) -> None:
    with opened(browser, address, viewport={"width": width, "height": 740}) as page:
        ask(page, "a" * 300)
        wait_for_answer(page)
        page.click("details.settings summary")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate("document.querySelector('#log').clientHeight") < 500  # the strip stays in reach


CONTRAST = """() => {
  const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (element) => {
    for (; element; element = element.parentElement) {
      const colour = rgb(getComputedStyle(element).backgroundColor);
      if (colour.length < 4 || colour[3] > 0) return colour;
    }
  };
  const poor = [];
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    if (!own || !element.checkVisibility() || element.disabled) continue;
    const [a, b] = [light(rgb(getComputedStyle(element).color)), light(behind(element))].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) poor.push(`${element.outerHTML.slice(0, 80)} ${(a + 0.05) / (b + 0.05)}`);
  }
  return poor;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast_is_enough_in_both_schemes(browser: Any, address: str, scheme: str) -> None:
    with opened(browser, address, color_scheme=scheme) as page:
        ask(page)
        wait_for_answer(page)
        page.hover(".assistant .step >> nth=1")
        assert page.evaluate(CONTRAST) == []


def test_the_theme_can_be_chosen_and_is_kept(browser: Any, address: str) -> None:
    paper = "getComputedStyle(document.body).backgroundColor"
    with opened(browser, address, color_scheme="light") as page:
        light = page.evaluate(paper)
        page.click("#theme")
        assert page.evaluate(paper) == light
        page.click("#theme")
        assert page.text_content("#theme") == "Theme: dark"
        dark = page.evaluate(paper)
        assert sum(map(int, re.findall(r"\d+", dark))) < 150
        page.reload()
        assert page.evaluate(paper) == dark


def test_an_api_key_is_asked_for(browser: Any) -> None:
    complaints: list[str] = []
    with serving(api_key="secret") as url, opened(browser, url, complaints) as page:
        page.wait_for_selector("#key-form:not([hidden])")
        page.fill("#key", "guess")
        page.keyboard.press("Enter")
        page.wait_for_function("() => document.querySelector('#key-label').textContent.includes('not accept')")
        page.fill("#key", "secret")
        page.click("#key-form button")
        page.wait_for_selector("#connection.live")
        assert not page.is_visible("#key-form")
        ask(page)
        assert wait_for_answer(page) == "".join(TEXTS)
    assert all("401" in text for text in complaints)


def test_the_page_needs_nothing_from_elsewhere() -> None:
    for path in PAGE.iterdir():
        links = re.findall(r"https?://[^\"' )]+", path.read_text(encoding="utf-8"))
        assert [link for link in links if link != "http://www.w3.org/2000/svg"] == [], path.name
    assert not re.search(r"<script(?![^>]*src=)|\son\w+=|style=", (PAGE / "index.html").read_text(encoding="utf-8"))
    assert sum(path.stat().st_size for path in PAGE.iterdir()) < 60_000


if __name__ == "__main__":  # screenshots for the docs: python -m tests.serve.test_page FOLDER
    import sys

    target = Path(sys.argv[1])
    with playwright.sync_playwright() as driver, serving() as url:
        chromium = driver.chromium.launch(executable_path=browser_path(), args=["--no-sandbox"])
        shots = {"page": ("light", 1280, 800), "page-dark": ("dark", 1280, 800), "page-phone": ("light", 390, 844)}
        for name, (scheme, width, height) in shots.items():
            with opened(chromium, url, color_scheme=scheme, viewport={"width": width, "height": height}) as page:
                for policy, question in (
                    ("full", "Why is the sky blue?"),
                    ("off", "And at noon?"),
                    ("dvl", "And at dusk?"),
                ):
                    page.select_option("#policy", policy)
                    page.click("#policy-form button")
                    ask(page, question, others=7)
                    page.wait_for_timeout(500)
                    if policy != "dvl":
                        wait_for_answer(page, len(page.locator(".assistant").all()))
                page.hover(".assistant >> nth=2 >> .step >> nth=3")
                page.screenshot(path=target / f"{name}.png", full_page=width < 500)
