"""Every link of the project's Markdown leads somewhere: to a file that is there, and to a heading that it has.

Addresses of other hosts are asked for at night, where there is a network.
"""

from __future__ import annotations

import posixpath
import re
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
from commands import ROOT
from docs_markdown import anchors, links, map_links, slug

PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in (ROOT, ROOT / "docs", ROOT / ".github", ROOT / "jpaged", ROOT / "deploy", ROOT / "scripts")
    for path in (folder.glob("*.md") if folder == ROOT else folder.rglob("*.md"))
)


def broken(page: str, markdown: str) -> list[str]:
    """The links of a page that lead nowhere in this repository."""
    found = []
    for link in links(markdown):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = posixpath.normpath(posixpath.join(posixpath.dirname(page), path)) if path else page
        there = (ROOT / target).exists()
        if there and anchor and target.endswith(".md"):
            there = anchor in anchors((ROOT / target).read_text())
        if not there:
            found.append(link)
    return found


@pytest.mark.parametrize("page", PAGES)
def test_links_of_a_page_lead_somewhere(page):
    assert broken(page, (ROOT / page).read_text()) == []


def test_a_broken_link_and_a_heading_that_is_gone_are_found():
    page = "[here](concepts.md#large-pages) [gone](nonesuch.md) [heading](concepts.md#nonesuch) `[no](x.md)`"
    assert broken("docs/index.md", page) == ["nonesuch.md", "concepts.md#nonesuch"]


def test_files_that_pages_name_in_passing_exist():
    """``docs/tpu.md`` in a sentence is no link, but a reader follows it all the same."""
    gone = []
    for page in PAGES:
        text = (ROOT / page).read_text()
        for name in re.findall(r"(?<![\w/.])(?:docs|tests|scripts)/[\w/.-]+\.(?:md|py|sh|yaml)\b", text):
            if not (ROOT / name).exists():
                gone.append(f"{page}: {name}")
    assert gone == []


@pytest.mark.parametrize("page", ["ARCHITECTURE.md", *(page for page in PAGES if "/architecture/" in page)])
def test_files_and_folders_that_the_architecture_names_exist(page):
    named = re.findall(r"`((?:jpaged|models|pallas_kernels|tests|scripts)/[\w/.]+?)/?`", (ROOT / page).read_text())
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_code_is_never_taken_for_a_link():
    page = "```python\nx = [a](b)\n```\n[text](page.md) and `[a](b)` and ![x](y.png)\n"
    assert links(page) == ["page.md", "y.png"]
    assert map_links(page, lambda link: None if link == "page.md" else f"up/{link}").endswith(
        "text and `[a](b)` and ![x](up/y.png)\n"
    )
    assert slug("## Layers, said `plainly`".lstrip("# ")) == "layers-said-plainly"


def status_of(address: str) -> int | None:
    """Return what a host answers; None = it cannot be reached, or not in time."""
    request = urllib.request.Request(address.partition("#")[0], headers={"User-Agent": "jpaged-docs-links"})
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code
    except (OSError, ValueError):
        return None


def gone(addresses: list[str]) -> list[str]:
    """Those of the addresses whose host says that there is no such page; hosts that refuse programs prove nothing."""
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(status_of, addresses))
    if addresses and set(found) == {None}:
        pytest.skip("no address can be reached: there is no network")
    return [address for address, status in zip(addresses, found, strict=True) if status in (404, 410)]


@pytest.mark.nightly
def test_links_to_other_hosts_lead_to_pages_that_are_there():
    found = {link for page in PAGES for link in links((ROOT / page).read_text()) if link.startswith("http")}
    assert len(found) >= 3
    assert gone(sorted(link for link in found if "localhost" not in link)) == []


def test_a_page_that_is_gone_is_found_and_without_a_network_nothing_is(monkeypatch):
    answers = {"https://a/": 200, "https://b/": 404, "https://c/": 403, "https://d/": None}
    monkeypatch.setitem(globals(), "status_of", answers.get)
    assert gone(sorted(answers)) == ["https://b/"]
    with pytest.raises(pytest.skip.Exception, match="no network"):
        gone(["https://d/"])
    assert gone([]) == []
