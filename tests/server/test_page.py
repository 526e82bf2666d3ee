"""The page at ``/``: its headers, and how it works in a browser."""

from __future__ import annotations

import hashlib
import json
import shutil
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from live import Live, live
from mlx_flash.server import serving as page_module
from mlx_flash.server.serving import Access, plain_key
from scripted import make_scripted_model, saying

CHROMIUM = shutil.which("chromium")
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")

FILES = Path(page_module.__file__).with_name("web")

ANSWER = """<think>Hm.</think>## The sea

Here:
- is **wet**, see [this](https://example.org/)
- has $c^2 = g/k$ and costs $5 or $6

| a | b |
| :- | -: |
| 1 | 2 |

```python
def sea() -> int:
    return 1 < 2
```

$$\\sqrt{x}$$

The end: <b>bold</b>."""

ATTACKS = """<script>window.hit = 1</script> <img src=x onerror="window.hit = 1"> <svg onload="window.hit = 1"></svg>

<iframe srcdoc="<script>parent.hit = 1</script>"></iframe>

[a](javascript:window.hit=1) [b](JaVaScRiPt:window.hit=1) [c](data:text/html,<script>window.hit=1</script>)
[d](vbscript:x) <javascript:window.hit=1> ![e](data:image/svg+xml,<svg/onload=window.hit=1>) [f](//example.org/f)
![g](https://example.org/g.png) [h](https://example.org/h"onmouseover="window.hit=1)

$\\href{javascript:window.hit=1}{x}$ $\\class{app}{x}$ $\\text{<img src=x onerror=window.hit=1>}$

```"><img src=x onerror=window.hit=1>
<img src=x onerror=window.hit=1></code></pre><img src=x onerror=window.hit=1>
```

<math><mtext><table><mglyph><style><!--</style><img title="--&gt;&lt;img src=1 onerror=window.hit=1&gt;">
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_scripted_model(tmp_path_factory.mktemp("models") / "sea"))


@pytest.fixture(scope="module")
def server(folder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.getbasetemp()))  # as during the tests
        with live(folder, telemetry=True) as running:
            yield running


def test_vendored_files_are_those_of_the_list() -> None:
    lines = (FILES / "vendor" / "SHA256SUMS").read_text().splitlines()
    listed = {name: digest for digest, name in (line.split("  ") for line in lines)}
    paths = [path for path in (FILES / "vendor").rglob("*") if path.is_file() and path.name != "SHA256SUMS"]
    found = {str(path.relative_to(FILES / "vendor")): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}
    assert found == listed
    assert {name.split("/")[0] + "/LICENSE" for name in found} <= set(found)
    assert sum(path.stat().st_size for path in FILES.rglob("*") if path.is_file()) < 400_000


def test_the_page_runs_nothing_but_its_own_files(server: Live) -> None:
    for path in ("/", "/page/page.js", "/page/vendor/marked/marked.esm.js"):
        with urllib.request.urlopen(server.url + path) as reply:
            headers = reply.headers
        assert headers["Content-Type"].split(";")[0] in ("text/html", "text/javascript", "application/javascript")
        assert (headers["X-Content-Type-Options"], headers["Referrer-Policy"]) == ("nosniff", "no-referrer")
        policy = dict(part.split(" ", 1) for part in headers["Content-Security-Policy"].split("; "))
        assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert policy["require-trusted-types-for"] == "'script'" and policy["trusted-types"] == "dompurify"
    assert server.get("/page/../page.py")[0] == server.get("/page/%2e%2e/page.py")[0] == 404


def test_facts_are_those_of_the_engine(server: Live) -> None:
    server.say("Hi")
    status, found = server.get("/facts")
    (engine,) = [each for each in found["engines"] if each["model"] == "sea"]
    assert status == 200 and engine["clock"] > 0
    assert engine["facts"]["budget.bytes"] == 2e9 and engine["facts"]["memory.footprint"] > 0


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@contextmanager
def shown(chromium: Any, url: str, width: int = 1280, height: int = 800) -> Iterator[Any]:
    """Show a page. It must neither fail nor violate its policy."""
    page = chromium.new_page(viewport={"width": width, "height": height})
    failures: list[str] = []
    page.on("pageerror", lambda error: failures.append(str(error)))
    page.on("console", lambda line: failures.append(line.text) if "Content Security" in line.text else None)
    page.set_default_timeout(6000)
    page.goto(url)
    page.wait_for_selector("#model option", state="attached")
    yield page
    page.close()
    assert not failures


def send(page: Any, text: str) -> None:
    page.fill("#text", text)
    page.press("#text", "Enter")
    page.wait_for_selector("#send:not([hidden])")


def faults(page: Any) -> list[str]:
    """Return what axe finds in both colour schemes."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    found = []
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        for each in axe.run(page).response["violations"]:
            found.append(f"{scheme}: {each['id']} {[node['html'] for node in each['nodes']]}")
    return found


@needs_browser
@pytest.mark.parametrize("width", [1280, 375])
def test_chat(chromium: Any, server: Live, width: int) -> None:
    prompts: list[str] = []
    with shown(chromium, server.url, width) as page:
        assert not faults(page)
        with saying(ANSWER, prompts):
            send(page, "<i>Tell me</i>")
        answer = page.locator(".assistant .text")
        assert page.text_content(".user .text") == "<i>Tell me</i>"
        assert page.text_content(".assistant .thought div") == "Hm." and not page.is_visible(".thought div")
        assert page.text_content(".assistant h3") == "The sea" and page.text_content(".assistant li strong") == "wet"
        assert "costs $5 or $6" in page.locator(".assistant li").last.text_content()
        assert page.locator(".assistant li math").count() == page.locator(".assistant .display math msqrt").count() == 1
        assert page.locator("td[align=right]").text_content() == "2"
        assert page.text_content(".assistant pre") == "def sea() -> int:\n    return 1 < 2\n"
        assert page.locator(".assistant pre .hljs-keyword").first.text_content() == "def"
        assert "The end: <b>bold</b>." in answer.text_content()
        assert "tokens/s" in page.text_content(".assistant .foot") and "of 2.00 GB" in page.text_content(".engine")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert not faults(page)

        with saying("Yes.", prompts):
            send(page, "Really?")
        assert "<|assistant|>## The sea" in prompts[-1] and "Hm." not in prompts[-1]
        page.reload()
        page.wait_for_selector(".assistant >> nth=1")
        assert (
            page.locator(".message .text >> nth=3").inner_text().strip() == "Yes."
            and page.locator(".display math").count()
        )

        with saying("No.", prompts):
            page.click(".again >> visible=true")
            page.wait_for_selector("text=No.")
            page.wait_for_selector("#send:not([hidden])")
        assert prompts[-1] == prompts[-2]
        page.hover(".user >> nth=1")
        page.locator(".user .edit").nth(1).click()
        page.fill(".editing textarea", "Surely?")
        with saying("Quite.", prompts):
            page.press(".editing textarea", "Enter")
            page.wait_for_selector("text=Quite.")
            page.wait_for_selector("#send:not([hidden])")
        assert "Surely?" in prompts[-1] and "Really?" not in prompts[-1] and page.locator(".message").count() == 4

        page.click(".settings summary")
        page.fill("#most", "0")
        send(page, "Again")
        assert "max_tokens" in page.text_content(".message:last-child .error")


@needs_browser
def test_conversations_are_kept_and_exported(chromium: Any, server: Live) -> None:
    with shown(chromium, server.url) as page:
        for question, reply in (("First", "<think>Hm.</think>`One`"), ("Second", "Two")):
            page.click("#fresh")
            with saying(reply):
                send(page, question)
        page.wait_for_selector("#list button >> nth=1")
        page.reload()
        page.wait_for_selector("#list button >> nth=1")
        assert page.locator("#list button").all_text_contents() == ["Second", "First"]
        page.click("text=First")
        page.wait_for_selector("code")
        texts = []
        for kind in ("markdown", "json"):
            page.click("#more")
            assert not faults(page)
            with page.expect_download() as download:
                page.click(f"#export-{kind}")
            texts.append(Path(download.value.path()).read_text())
            assert download.value.suggested_filename == {"markdown": "First.md", "json": "First.json"}[kind]
        assert "# First\n" in texts[0] and "## You\n\nFirst\n" in texts[0] and "## Answer\n" in texts[0]
        assert texts[0].endswith("Reasoning</summary>\n\nHm.\n\n</details>\n\n`One`\n")
        messages = json.loads(texts[1])["messages"]
        assert [each["content"] for each in messages] == ["First", "`One`"] and messages[1]["reasoning"] == "Hm."
        page.on("dialog", lambda dialog: dialog.accept())
        page.click("#more")
        page.click("#delete")
        page.wait_for_selector("#list button >> nth=1", state="detached")
        page.reload()
        page.wait_for_selector("#list button")
        assert page.locator("#list button").all_text_contents() == ["Second"]


@needs_browser
def test_escape_stops_an_answer(chromium: Any, server: Live) -> None:
    with shown(chromium, server.url) as page:
        page.click(".settings summary")
        page.fill("#most", "20000")
        page.fill("#text", "Go on")
        page.press("#text", "Enter")
        page.wait_for_selector(".assistant .text > *")
        page.keyboard.press("Escape")
        page.wait_for_selector("#send:not([hidden])")
        assert "stopped" in page.text_content(".assistant .foot")


@needs_browser
def test_text_of_a_model_runs_nothing(chromium: Any, server: Live) -> None:
    with shown(chromium, server.url) as page:
        with saying(ATTACKS):
            send(page, "Attack")
        page.wait_for_timeout(200)
        text = page.locator(".assistant .text")
        assert page.evaluate("window.hit") is None
        assert "<script>window.hit = 1</script>" in text.text_content()
        assert text.locator("script, img, svg, iframe, style, mglyph, form, input, .app").count() == 0
        names = text.evaluate("(root) => [...root.querySelectorAll('*')].flatMap((each) => each.getAttributeNames())")
        assert not [name for name in names if name.startswith("on") or name in ("id", "style", "src", "name")]
        links = text.evaluate("(root) => [...root.querySelectorAll('a[href]')].map((a) => a.getAttribute('href'))")
        assert len(links) == 2 and all(link.startswith("https://example.org/") for link in links)
        assert (
            page.evaluate("try { document.body.innerHTML = '<p>'; 'set' } catch (error) { error.name }") == "TypeError"
        )


@needs_browser
def test_growing_markdown_does_not_flicker(chromium: Any, server: Live) -> None:
    text = "Here:\n- one\n- two\n\n```python\nif a:\n    b\n\n--- x\n```\n\nThe end.\n\n| a |\n| - |\n| 1 |\n"
    with shown(chromium, server.url) as page:
        frames = page.evaluate(
            """async (text) => {
                const { Markdown } = await import("/page/markdown.js");
                const box = document.createElement("div"), markdown = new Markdown(box), frames = [];
                let first = null;
                for (let end = 1; end <= text.length; end += 1) {
                    markdown.show(text.slice(0, end), true);
                    if (end === text.indexOf("if a")) first = box.firstChild;
                    const count = (names) => box.querySelectorAll(names).length;
                    frames.push([box.innerText, count("h1,h2,h3,h4,hr"), count("pre")]);
                }
                markdown.show(text, false);
                return { frames, isSame: box.firstChild === first, end: box.querySelectorAll("td").length };
            }""",
            text,
        )
    assert frames["isSame"] and frames["end"] == 1
    assert not [found for found in frames["frames"] if "`" in found[0] or found[1]]
    counts = [found[2] for found in frames["frames"]]
    assert counts == sorted(counts) and counts[-1] == 1


@needs_browser
def test_pictures_go_to_models_that_see(chromium: Any, server: Live) -> None:
    data = bytes.fromhex("89504e470d0a1a0a")
    paste = """(kind) => {
        const data = new DataTransfer();
        data.items.add(new File([new Uint8Array([137, 80, 78, 71, 13, 10, 26, 10])], "b.png", { type: "image/png" }));
        const event = kind === "drop" ? new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true })
            : new ClipboardEvent("paste", { clipboardData: data, bubbles: true, cancelable: true });
        document.getElementById("text").dispatchEvent(event);
    }"""
    with shown(chromium, server.url) as page:
        assert not page.is_visible("#attach")
        page.evaluate(paste, "paste")
        page.wait_for_selector("text=takes no pictures here")
        page.route("**/api/show", lambda route: route.fulfill(json={"capabilities": ["completion", "vision"]}))
        page.reload()
        page.wait_for_selector("#attach")
        page.set_input_files("#files", {"name": "a.png", "mimeType": "image/png", "buffer": data})
        page.wait_for_selector("#pictures img")
        for number, kind in enumerate(("paste", "drop"), 2):
            page.evaluate(paste, kind)
            page.wait_for_selector(f"#pictures img >> nth={number - 1}")
        page.click("#pictures button >> nth=2")
        assert not faults(page)
        with page.expect_request("**/v1/chat/completions") as sent:
            send(page, "What is this?")
        parts = sent.value.post_data_json["messages"][0]["content"]
        assert [part["type"] for part in parts] == ["image_url", "image_url", "text"]
        assert parts[0]["image_url"]["url"] == parts[1]["image_url"]["url"] == "data:image/png;base64,iVBORw0KGgo="
        assert "takes no pictures here" in page.text_content(".assistant .error")  # the server's own words


@needs_browser
def test_a_lost_server_is_reported(chromium: Any, server: Live) -> None:
    with shown(chromium, server.url) as page:
        page.context.set_offline(True)
        send(page, "Hi")
        assert "connection to the server was lost" in page.text_content(".error")
        page.wait_for_selector("#lost")
        assert not faults(page)
        page.context.set_offline(False)
        page.wait_for_selector("#lost", state="hidden")
        with saying("Hello."):
            page.click(".again")
            page.wait_for_selector("text=Hello.")
        assert page.locator(".error >> visible=true").count() == 0


@needs_browser
def test_the_page_asks_for_a_key(chromium: Any, folder: str) -> None:
    page = chromium.new_page()
    with live(folder, access=Access([plain_key("secret")])) as locked:
        page.goto(locked.url)
        page.fill("#key", "secret")
        page.press("#key", "Enter")
        page.wait_for_selector("#key-form", state="hidden")
        with saying("Hello."):
            send(page, "Hi")
        assert page.text_content(".assistant .text").strip() == "Hello."
        page.close()
