"""The documentation's site is built strictly, fetches nothing from elsewhere, and can be searched in a browser."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import docs_site
import pytest
from commands import ROOT, root_command, walk

pytest.importorskip("mkdocs", reason="needs the extra docs")
pytest.importorskip("material", reason="needs the extra docs")
COMMANDS = dict(walk("jpaged", root_command()))
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")

pytestmark = pytest.mark.nightly  # .ci/run builds the site by scripts/docs.sh


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The site as scripts/docs.sh builds it, but in another folder. A warning ends the build."""
    folder = tmp_path_factory.mktemp("site") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1", "PATH": path, "DOCS_SITE_URL": "https://host/"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return folder


def test_every_page_of_the_navigation_is_built_and_fetches_nothing_from_elsewhere(site):
    for page in docs_site.pages(docs_site.navigation()):
        html = (site / page).with_suffix(".html").read_text()
        assert re.findall(r'<(?:script|img)[^>]+src="https?:[^"]*"', html) == [], page


def test_llms_txt_names_the_pages_and_the_command_page_the_commands(site):
    text = (site / "llms.txt").read_text()
    assert text.startswith("# jpaged\n\n> ")
    named = set(re.findall(r"\(https://host/(.+?\.md)\)", text))
    decisions = {page for page in named if page.startswith("decisions/0")}
    nav = {page for page in docs_site.pages(docs_site.navigation()) if not page.startswith("project/")}
    assert len(decisions) > 10 and nav == named - decisions
    assert "block table" in (site / "llms-full.txt").read_text()
    commands = (site / "cli.html").read_text()
    for name, command in COMMANDS.items():
        assert f"<code>{name}</code>" in commands or name == "jpaged"
        for option in command.params:
            assert option.param_type_name == "argument" or option.opts[0] in commands, (name, option.opts)


@pytest.fixture
def address(site) -> Iterator[str]:
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed (Debian's package chromium)")
def test_a_reader_who_searches_for_a_word_finds_the_page_that_has_it(address):
    playwright = pytest.importorskip("playwright.sync_api", reason="needs the extra browser")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        hosts, errors = set(), []
        page.on("request", lambda request: hosts.add(request.url.split("/")[2]))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(f"http://{address}/index.html")
        page.click("[data-md-component=search-query]")
        page.keyboard.type("idempotency")
        found = page.locator("a.md-search-result__link")
        found.first.wait_for(timeout=20_000)
        targets = [link.get_attribute("href") or "" for link in found.all()]
        assert any("serving.html" in target for target in targets), targets
        page.locator("a.md-search-result__link[href*='serving.html']").first.click()
        page.wait_for_url("**/serving.html*")
        assert "Idempotency-Key" in page.locator("article").inner_text()
        assert (hosts, errors) == ({address}, [])
        browser.close()
