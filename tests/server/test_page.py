"""The page at ``/``: its headers, and how it works in a browser."""

from __future__ import annotations

import base64
import hashlib
import re
import shutil
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from live import Live, live
from mlx_flash.server.access import Access
from scripted import make_scripted_model, saying

CHROMIUM = shutil.which("chromium")
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_scripted_model(tmp_path_factory.mktemp("models") / "sea"))


@pytest.fixture(scope="module")
def server(folder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.getbasetemp()))  # as during the tests
        with live(folder, telemetry=True) as running:
            yield running


def test_the_page_runs_nothing_but_its_own_script(server: Live) -> None:
    with urllib.request.urlopen(server.url) as reply:
        text, headers = reply.read().decode(), reply.headers
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    assert (headers["X-Content-Type-Options"], headers["Referrer-Policy"]) == ("nosniff", "no-referrer")
    policy = dict(part.split(" ", 1) for part in headers["Content-Security-Policy"].split("; "))
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert policy["connect-src"] == "'self'"
    for tag in ("script", "style"):
        (part,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.S)
        digest = base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()
        assert policy[f"{tag}-src"] == f"'sha256-{digest}'"
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|https?://(?!www\.w3\.org)", text
    )
    assert not re.search(r"\s(style|on\w+)=", text)


def test_facts_are_those_of_the_engine(server: Live) -> None:
    server.say("Hi")
    status, found = server.get("/facts")
    (engine,) = [each for each in found["engines"] if each["model"] == "sea"]
    assert status == 200 and engine["clock"] > 0
    assert engine["facts"]["budget.bytes"] == 2e9 and engine["facts"]["memory.footprint"] > 0


@contextmanager
def browser(url: str, width: int = 1280, height: int = 800, **options: Any) -> Iterator[Any]:
    """Show a page. It must neither fail nor violate its policy."""
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = chromium.new_page(viewport={"width": width, "height": height}, **options)
        failures: list[str] = []
        page.on("pageerror", lambda error: failures.append(str(error)))
        page.on("console", lambda line: failures.append(line.text) if "Content Security" in line.text else None)
        page.goto(url)
        yield page
        chromium.close()
        assert not failures


def send(page: Any, text: str) -> None:
    page.fill("#text", text)
    page.press("#text", "Enter")
    page.wait_for_selector("#send:not([hidden])")


@needs_browser
@pytest.mark.parametrize("width", [1280, 375])
def test_chat_in_a_browser(server: Live, width: int) -> None:
    prompts: list[str] = []
    with browser(server.url, width) as page:
        with saying("<think>Hm.</think><b>The</b> sea:\n```\n1 < 2\n```\nis <img src=x> wet.", prompts):
            send(page, "<i>Tell me</i>")
            page.wait_for_selector(".assistant .text p")
        assert page.text_content(".message.user") == "<i>Tell me</i>"
        assert page.text_content(".assistant .text").startswith("<b>The</b> sea:")
        assert page.text_content(".assistant pre") == "1 < 2\n" and not page.query_selector(".message b, .message img")
        assert page.text_content(".assistant .thought div") == "Hm."
        assert "tokens/s" in page.text_content(".assistant .foot")
        with saying("Yes.", prompts):
            send(page, "Really?")
            page.wait_for_function("document.querySelectorAll('.assistant .text p').length === 3")
        assert "<|assistant|><b>The</b> sea:" in prompts[-1] and prompts[-1].rstrip().endswith("<|assistant|>")
        page.wait_for_selector(".engine", state="attached")
        assert "of 2.00 GB" in page.text_content(".engine")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        page.click(".settings summary")
        page.fill("#most", "0")
        send(page, "Again")
        assert "max_tokens" in page.text_content(".error")
        page.click("#fresh")
        assert page.query_selector(".message") is None


@needs_browser
def test_an_answer_can_be_stopped(server: Live) -> None:
    with browser(server.url) as page:
        page.click(".settings summary")
        page.fill("#most", "20000")
        page.fill("#text", "Go on")
        page.press("#text", "Enter")
        page.wait_for_selector(".assistant .text p")
        page.click("#stop")
        page.wait_for_selector("#send:not([hidden])")
        assert "stopped" in page.text_content(".assistant .foot")


@needs_browser
def test_the_page_asks_for_a_key(folder: str) -> None:
    with live(folder, access=Access("secret")) as locked, browser(locked.url) as page:
        page.fill("#key", "secret")
        page.press("#key", "Enter")
        page.wait_for_selector("#key-form", state="hidden")
        with saying("Hello."):
            send(page, "Hi")
            page.wait_for_selector(".assistant .text p")
        assert page.text_content(".assistant .text") == "Hello."
