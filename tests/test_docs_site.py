"""The built site: no warnings, nothing from other hosts, equations and search work offline."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

for part in ("mkdocs", "material", "mkdocstrings", "latex2mathml"):
    pytest.importorskip(part, reason=f"{part} is not installed; it comes with testtime[docs]")


def script(name: str) -> ModuleType:
    """One of the scripts in scripts/, as a module."""
    found = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built with warnings as errors."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


class Fetched(HTMLParser):
    """What a browser fetches when it loads a page: everything but links."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            return
        self.addresses += [
            value for key, value in attrs if value and key in ("src", "href", "srcset", "data", "poster")
        ]


def fetched(page: str) -> list[str]:
    reader = Fetched()
    reader.feed(page)
    return (
        reader.addresses + re.findall(r"url\(\s*[\"']?([^)\"']+)", page) + re.findall(r"@import\s+[\"']([^\"']+)", page)
    )


def outside(addresses: list[str]) -> list[str]:
    return [address for address in addresses if re.match(r"\s*(https?:)?//", address)]


def test_pages_fetch_nothing_from_another_host(site: Path) -> None:
    files = [path for suffix in ("html", "css") for path in site.rglob(f"*.{suffix}")]
    assert len(files) > 12
    for path in files:
        found = fetched(path.read_text())
        whole = path.suffix == ".css" or path.parent.name == "board"  # the board's page holds all that it shows
        assert whole or found, f"{path.name} fetches nothing at all, which is impossible"
        assert not outside(found), f"{path.name} fetches {outside(found)}"


def test_what_a_page_would_fetch_from_another_host_is_noticed() -> None:
    page = '<a href="https://x.org">follow</a><script src="//cdn.org/a.js"></script><link href="https://f.org/f.css">'
    assert outside(fetched(page)) == ["//cdn.org/a.js", "https://f.org/f.css"]
    assert outside(fetched("@font-face { src: url('https://f.org/a.woff') }")) == ["https://f.org/a.woff"]


def test_equations_are_mathml(site: Path) -> None:
    page = (site / "dpe.html").read_text()
    assert page.count("<math ") > 20 and "arithmatex" not in page


def test_an_equation_keeps_its_source_as_its_label() -> None:
    math = script("docs_math")
    page = math.on_page_content('<p><span class="arithmatex">\\(a &lt; b\\)</span></p>')
    assert 'aria-label="a &lt; b"' in page and "<mi>a</mi>" in page and "\\(" not in page


def test_examples_in_docstrings_become_code() -> None:
    fenced = script("docs_doctests").fenced
    text = "What comes back.\n\n>>> one = 1\n>>> one\n1\n\nAnd more."
    assert fenced(text) == "What comes back.\n\n```pycon\n>>> one = 1\n>>> one\n1\n```\n\nAnd more."
    assert fenced("No example > here.") == "No example > here."


def test_examples_reach_the_reference_as_code(site: Path) -> None:
    page = (site / "api.html").read_text()
    assert "&gt;&gt;&gt; " in page and "<blockquote>" not in page


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
def test_the_site_reads_from_disk_and_its_search_answers(site: Path) -> None:
    pytest.importorskip("playwright", reason="playwright is not installed")
    from playwright.sync_api import sync_playwright

    requests: list[str] = []
    faults: list[str] = []
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_context(viewport={"width": 390, "height": 844}).new_page()
        page.on("request", lambda request: requests.append(request.url))
        page.on("pageerror", lambda error: faults.append(str(error)))
        for path in sorted(site.glob("*.html")):
            page.goto(path.as_uri())
            assert page.evaluate("document.documentElement.scrollWidth") <= 390, f"{path.name} is too wide for a phone"
        page.set_viewport_size({"width": 1280, "height": 900})
        page.goto((site / "index.html").as_uri())
        page.click("input.md-search__input")
        page.keyboard.type("alignment")
        page.wait_for_selector(".md-search-result__item a", timeout=20_000)
        browser.close()
    assert requests and not outside(requests)
    assert not faults
