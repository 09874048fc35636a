"""The service's page in a real browser, against a real server: what it shows, what it does, and what it never does."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
from fake_service import served
from PIL import Image

import testtime.report
import testtime.serve
from testtime import load_encoder
from testtime.serve.app import make_app
from testtime.serve.auth import Gate, add_token
from testtime.serve.service import Service

pytest.importorskip("playwright", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
if CHROMIUM is None:
    pytest.skip("no chromium on this machine", allow_module_level=True)

PAGE = Path(testtime.serve.__file__).parent / "page"
SCRIPTS = sorted(PAGE.glob("*.js"))
HOSTILE = "<img src=x onerror=document.title='hacked'>"
WIDTHS = [390, 768, 1280, 1920]


def picture(shade: int, name: str = "") -> dict[str, object]:
    """An image as Playwright takes a file; each shade is another image."""
    image = Image.new("RGB", (64, 48), (shade * 37 % 256, shade * 91 % 256, 80))
    image.paste((shade * 53 % 256, 20, 200), (shade % 40, 5, shade % 40 + 20, 40))
    data = io.BytesIO()
    image.save(data, "PNG")
    return {"name": name or f"shade-{shade}.png", "mimeType": "image/png", "buffer": data.getvalue()}


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """A server without tokens."""
    folder = tmp_path_factory.mktemp("service")
    with served(make_app(Service(load_encoder("tiny"), folder), Gate(folder, "127.0.0.1"))) as found:
        yield found


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    fake_camera = ["--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"]
    with sync_playwright() as play:
        chromium = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", *fake_camera])
        yield chromium
        chromium.close()


@pytest.fixture
def visit(browser, address):
    """Opens the page at "#/..."; afterwards there must be no console output, no error and no request to another host.

    The browser itself logs answers of 4xx; those that a test provokes are named by `expected`.
    """
    problems: list[str] = []
    with ExitStack() as closing:

        def go(where="", size=(1280, 900), at=None, expected=(), **options):
            home = at or address
            page = browser.new_page(viewport={"width": size[0], "height": size[1]}, **options)
            closing.callback(page.close)
            page.set_default_timeout(10_000)

            def told(message):
                if not any(f"status of {status}" in message.text for status in expected):
                    problems.append(f"console: {message.text}")

            page.on("console", told)
            page.on("pageerror", lambda error: problems.append(f"error: {error}"))
            own = (home, f"blob:{home}")
            page.on("request", lambda asked: asked.url.startswith(own) or problems.append(f"request: {asked.url}"))
            page.goto(f"{home}/#/{where}")
            return page

        yield go
    assert not problems


@pytest.fixture
def stream(address, request):
    """A stream of its own for a test."""
    name = re.sub(r"\W", "-", request.node.name)[:60]
    made = httpx.post(
        f"{address}/v1/streams", json={"name": name, "classes": ["cat", "dog", "fox"], "thumbnails": True}
    )
    assert made.status_code == 201, made.text
    return name


def of(address: str, name: str) -> dict:
    return httpx.get(f"{address}/v1/streams/{name}").json()


def send(page, *files: dict[str, object]) -> None:
    """Choose image files, and wait until each is answered."""
    before = int(page.locator("#numbers b").first.inner_text())
    page.set_input_files("#files", files)
    page.locator("#numbers b").first.get_by_text(str(before + len(files)), exact=True).wait_for()


def opened(page):
    page.locator("#connection", has_text="live").wait_for()
    page.locator("#numbers li").first.wait_for()
    return page


def test_a_stream_is_made_and_gives_both_answers(visit, address):
    page = visit()
    page.get_by_label("Name", exact=True).fill("first")
    page.get_by_label(re.compile("Classes")).fill("cat, dog\nred fox")
    page.get_by_label(re.compile("Keep thumbnails")).check()
    page.get_by_role("button", name="Create").click()
    opened(page)
    made = of(address, "first")
    assert made["classes"] == ["cat", "dog", "red fox"] and made["guard"] and made["thumbnails"]
    send(page, picture(1))
    ours, frozen = (page.locator(f".versus .{tone} .verdict b").inner_text() for tone in ("s1", "s0"))
    row = httpx.get(f"{address}/v1/streams/first/images").json()["images"][0]
    assert (ours, frozen) == (row["label"], row["zero_shot"])
    assert page.locator(".versus .s1 .bars li").count() == 3
    assert ("not learned from" in page.locator("#answer-state").inner_text()) is not row["learned"]
    assert row["label"] in page.locator("#spoken").text_content()
    page.get_by_role("link", name="All streams").click()
    assert "1 image" in page.locator("#streams li", has_text="first").inner_text()


def test_images_that_cannot_be_read_are_named(visit, stream):
    page = opened(visit(stream, expected=[422]))
    page.set_input_files("#files", {"name": "notes.txt", "mimeType": "text/plain", "buffer": b"no image"})
    page.locator("#failed li", has_text="notes.txt").wait_for()
    send(page, picture(2))
    assert page.locator("#failed li").count() == 0


def test_dropped_and_pasted_images_are_sent(visit, stream):
    page = opened(visit(stream))
    for place, kind in enumerate(["drop", "paste"], 1):
        page.evaluate(
            """async ([kind, shade]) => {
                const canvas = new OffscreenCanvas(40, 40), paint = canvas.getContext("2d");
                paint.fillStyle = shade; paint.fillRect(5, 5, 20, 30);
                const files = new DataTransfer();
                files.items.add(new File([await canvas.convertToBlob()], `${kind}.png`, { type: "image/png" }));
                document.querySelector("#drop").dispatchEvent(kind === "drop"
                    ? new DragEvent("drop", { dataTransfer: files, bubbles: true, cancelable: true })
                    : new ClipboardEvent("paste", { clipboardData: files, bubbles: true }));
            }""",
            [kind, ["red", "teal"][place - 1]],
        )
        page.locator("#log li", has_text=f"{kind}.png").wait_for()


def test_predicting_alone_leaves_no_trace(visit, stream, address):
    page = opened(visit(stream))
    page.get_by_label("Learn from them").uncheck()
    page.set_input_files("#files", picture(3))
    page.locator("#answer-state", has_text="predict only").wait_for()
    assert not page.locator("#feedback").is_visible()
    assert of(address, stream)["events"] == 0


def test_the_camera_sends_a_frame_a_second_until_stopped(visit, stream, address):
    page = opened(visit(stream))
    page.get_by_role("button", name="Use the camera").click()
    page.locator("#log li", has_text="camera-2.jpg").wait_for()
    page.get_by_role("button", name="Stop the camera").click()
    assert not page.locator("#video").is_visible()
    page.wait_for_timeout(500)
    sent = of(address, stream)["images"]
    page.wait_for_timeout(1200)
    assert of(address, stream)["images"] == sent


def test_a_snapshot_is_taken_and_gone_back_to_and_the_present_kept(visit, stream, address):
    page = opened(visit(stream))
    send(page, picture(1), picture(2))
    page.locator("#snapshot").get_by_label("Title").fill("two images")
    page.get_by_role("button", name="Take a snapshot").click()
    taken = page.locator("#snapshots li", has_text="two images")
    taken.wait_for()
    send(page, picture(3))
    taken.get_by_role("button", name=re.compile("^Roll back")).click()
    notice = page.locator(".notice", has_text="Back at 2 images.")
    notice.get_by_role("button", name=f"Open {stream[:48]}-at-3").wait_for()
    page.locator("#log .gone", has_text="shade-3.png").wait_for()
    assert of(address, stream)["images"] == 2
    assert of(address, f"{stream[:48]}-at-3")["position"] == 3
    page.get_by_role("button", name="Changes by hand").click()
    assert "Rolled back" in page.locator("#log").inner_text()


def test_an_image_is_unlearned_and_its_traces_go(visit, stream, address):
    page = opened(visit(stream))
    send(page, picture(1, "private.png"), picture(2))
    page.get_by_role("button", name="Unlearn image #1").click()
    page.locator("#log", has_text="Image, unlearned").wait_for()
    assert of(address, stream)["images"] == 1
    assert "private.png" not in page.locator("#log").inner_text()
    page.get_by_role("button", name="Unlearn this image").click()
    page.locator("#answer").wait_for(state="hidden")


def test_a_judged_image_stays_while_others_come(visit, stream, address):
    page = opened(visit(stream))
    send(page, picture(1))
    page.get_by_label("Right answer").focus()
    httpx.post(f"{address}/v1/streams/{stream}/images", files={"file": ("other.png", picture(2)["buffer"])})
    page.locator("#log li", has_text="other.png").wait_for()
    assert page.locator("#answer-name").inner_text() == "shade-1.png"
    page.get_by_label("Right answer").select_option("fox")
    page.get_by_role("button", name="Give it").click()
    page.locator("#numbers li", has_text="Adapted right").wait_for()
    rows = httpx.get(f"{address}/v1/streams/{stream}/images").json()["images"]
    assert next(row["detail"] for row in rows if row["kind"] == "label")["image"] == 1
    page.get_by_role("button", name="Show the latest").click()
    assert page.locator("#answer-name").inner_text() == "other.png"


def test_classes_come_and_go_and_the_stream_is_forked_and_moved(visit, stream, address, tmp_path):
    page = opened(visit(stream))
    page.get_by_label("New class").fill("owl")
    page.get_by_role("button", name="Add", exact=True).click()
    page.get_by_role("button", name="Remove the class owl").click()
    page.get_by_role("button", name="Remove", exact=True).click()
    page.locator("#classes", has_text="owl").wait_for(state="detached")
    assert of(address, stream)["classes"] == ["cat", "dog", "fox"]
    with page.expect_download() as download:
        page.get_by_role("button", name="Export the state").click()
    saved = tmp_path / download.value.suggested_filename
    download.value.save_as(saved)
    page.get_by_label("Fork as").fill("forked")
    page.get_by_role("button", name="Fork", exact=True).click()
    page.locator("h1", has_text="forked").wait_for()
    page.get_by_role("button", name="Delete the stream").click()
    page.get_by_role("button", name="Delete", exact=True).click()
    page.get_by_text("Import a saved state").click()
    page.get_by_label("Name of the new stream").fill("imported")
    page.set_input_files("#import [name=file]", saved)
    page.get_by_role("button", name="Import", exact=True).click()
    page.locator("h1", has_text="imported").wait_for()
    assert httpx.get(f"{address}/v1/streams/forked").status_code == 404


def test_everything_is_forgotten_only_after_a_question(visit, stream, address):
    page = opened(visit(stream))
    send(page, picture(1))
    page.get_by_role("button", name="Forget everything").click()
    page.get_by_role("button", name="Cancel").click()
    assert of(address, stream)["images"] == 1
    page.get_by_role("button", name="Forget everything").click()
    page.get_by_role("button", name="Forget", exact=True).click()
    page.locator("#numbers b").first.get_by_text("0", exact=True).wait_for()


def test_an_alarm_is_shown_and_offers_to_go_back(visit, stream, address):
    for shade in (1, 2, 3):
        httpx.post(f"{address}/v1/streams/{stream}/images", files={"file": ("a.png", picture(shade)["buffer"])})

    def alarmed(route):  # a stream long enough to drift would take too long here
        answer = route.fetch()
        route.fulfill(response=answer, json=answer.json() | {"alarms": [2]})

    page = visit()
    page.route(f"**/v1/streams/{stream}", alarmed)
    page.evaluate("name => { location.hash = `#/${name}` }", stream)
    banner = page.locator(".banner", has_text="The stream has changed at image #2")
    page.locator("#entropy .alarm").wait_for(state="attached")
    banner.get_by_role("button", name="Roll back to before it").click()
    page.locator(".notice", has_text="Back at 1 image.").wait_for()
    assert of(address, stream)["images"] == 1
    banner.get_by_role("button", name="Dismiss").click()
    banner.wait_for(state="detached")
    page.unroute_all(behavior="wait")


def test_the_tour_explains_in_six_steps_and_goes_back(visit, address):
    page = visit()
    page.get_by_role("button", name="Take the one-minute tour").click()
    panel = page.locator("#tour")
    titles = []
    for _ in range(6):
        panel.wait_for()
        titles.append(panel.locator("h2").inner_text())
        if len(titles) < 6:
            page.keyboard.press("Tab")
            panel.get_by_role("button", name="Next").click()
    assert len(set(titles)) == 6 and "1 of 6" not in panel.inner_text()
    page.locator("#accuracy svg polyline").first.wait_for()
    name = page.locator("h1").inner_text()
    panel.get_by_role("button", name="Roll back now").click()
    page.locator(".notice", has_text="Back at 100 images.").wait_for()
    panel.get_by_role("button", name="Finish").click()
    page.locator("#streams").wait_for(state="attached")
    assert httpx.get(f"{address}/v1/streams/{name}").status_code == 404


def test_hostile_names_are_shown_as_text(visit, address):
    classes = [HOSTILE, "dog"]
    httpx.post(f"{address}/v1/streams", json={"name": "hostile", "classes": classes, "thumbnails": True})
    page = opened(visit("hostile"))
    send(page, *(picture(shade, f"{HOSTILE.replace('/', '')}-{shade}.png") for shade in range(3)))
    page.locator("#snapshot").get_by_label("Title").fill(HOSTILE)
    page.get_by_role("button", name="Take a snapshot").click()
    for part in ("#snapshots", "#classes", "#log", "#answer"):
        page.locator(part, has_text=HOSTILE).first.wait_for()
    assert page.locator("img[src='x']").count() == 0 and "hacked" not in page.title()


def test_a_token_is_asked_for_and_kept_in_the_tab_only(visit, browser, tmp_path):
    secret = add_token(tmp_path, "someone", "admin")
    with served(make_app(Service(load_encoder("tiny"), tmp_path), Gate(tmp_path, "127.0.0.1"))) as home:
        page = visit(at=home, expected=[401])
        page.locator("[name=token]").fill("wrong")
        page.get_by_role("button", name="Use it").click()
        page.get_by_text("The server refused this token.").wait_for()
        page.locator("[name=token]").fill(secret)
        page.get_by_role("button", name="Use it").click()
        page.get_by_label("Name", exact=True).fill("guarded")
        page.get_by_label(re.compile("Classes")).fill("cat, dog")
        page.get_by_label(re.compile("Keep thumbnails")).check()
        page.get_by_role("button", name="Create").click()
        opened(page)  # by an event stream, which needs the token too
        send(page, picture(1))
        page.reload()
        opened(page).locator("#log-part").scroll_into_view_if_needed()
        page.locator("#log img").wait_for()  # a thumbnail, which needs it too
        kept = page.evaluate("[Object.values(sessionStorage), localStorage.length, document.cookie]")
        assert kept == [[secret], 0, ""] and secret not in page.url
        page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_sticks_out_at_any_width(visit, stream, scheme):
    page = opened(visit(stream, color_scheme=scheme))
    send(page, picture(1, f"{'a-rather-long-name' * 8}.png"), picture(2))
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (paper == "rgb(255, 255, 255)") is (scheme == "light")
    for where in (f"#/{stream}", "#/"):
        page.evaluate("where => { location.hash = where }", where)
        page.locator("#connection, #streams li").first.wait_for()
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": 900})
            assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_the_page_is_usable_by_keyboard_and_names_its_controls(visit, stream):
    page = opened(visit(stream))
    send(page, picture(1))
    nameless = page.evaluate("""() => [...document.querySelectorAll("button, input, select, a, textarea")]
        .filter((node) => node.checkVisibility() && !node.ariaLabel && !node.textContent.trim() && !node.labels?.length)
        .map((node) => node.outerHTML)""")
    assert nameless == []
    seen = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        seen.add(page.evaluate("document.activeElement.id || document.activeElement.ariaLabel"))
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none" or page.evaluate("document.activeElement === document.body")
    assert {"choose", "camera", "learn", "unlearn", "Unlearn image #1", "export", "delete"} <= seen
    assert page.locator("#spoken").get_attribute("aria-live") == "polite"
    assert page.evaluate("[...document.querySelectorAll('figure:not([hidden]) svg')].every((svg) => svg.ariaLabel)")


def test_the_page_has_no_inline_code_and_inserts_no_markup():
    markup = (PAGE / "index.html").read_text()
    assert not re.search(r"\sstyle=|\son\w+=|<script(?![^>]*src=)|javascript:|https?://", markup)
    for script in SCRIPTS:
        text = script.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|https?://", text), script
        assert "localStorage" not in text and len(text.splitlines()) < 250, script


@pytest.mark.skipif(shutil.which("node") is None, reason="no node on this machine")
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_each_script_parses(script):
    command = ["node", "--input-type=module", "--check"]
    assert subprocess.run(command, input=script.read_bytes(), capture_output=True).stderr == b""


def test_the_page_has_the_colours_of_the_report(address):
    report = Path(testtime.report.__file__).parent / "assets" / "tokens.css"
    assert httpx.get(f"{address}/assets/tokens.css").content == report.read_bytes()
