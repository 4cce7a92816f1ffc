"""Each of the site's pages has its place, tables that follow from the code are whole, and links lead somewhere."""

from __future__ import annotations

import pkgutil
import re
from importlib import import_module

import docs_site
import docs_vllm
import pytest
import settings_table
from commands import ROOT
from docs_markdown import code_blocks

import jpaged
import jpaged.model_api
import jpaged.planning
import jpaged.training
import pallas_kernels

NAV = docs_site.pages(docs_site.navigation())
DOCS = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}


def shown(name: str) -> str:
    """A page of docs/ as the site shows it."""
    return docs_site.site_page(name, (ROOT / "docs" / name).read_text())


def test_every_page_has_one_place_in_the_navigation_and_a_decision_in_its_index():
    assert len(NAV) == len(set(NAV))
    decisions = {page for page in DOCS if page.startswith("decisions/0")}
    assert set(NAV) == DOCS - decisions | set(docs_site.PROJECT_PAGES.values())
    index = (ROOT / "docs" / "decisions" / "index.md").read_text()
    assert [page for page in sorted(decisions) if f"({page.removeprefix('decisions/')})" not in index] == []


def test_every_public_name_is_in_the_reference():
    text = "".join(path.read_text() for path in (ROOT / "docs" / "api").glob("*.md"))
    entries = set(re.findall(r"^::: (\S+)$", text, re.MULTILINE))
    index = (ROOT / "docs" / "api" / "index.md").read_text()
    for name in jpaged.__all__:
        assert name == "__version__" or (f"jpaged.{name}" in entries and f"[`{name}`][jpaged.{name}]" in index), name
    for module in (jpaged.model_api, jpaged.planning, jpaged.training):
        for name in module.__all__:
            home = f"{module.__name__}.{name}"
            assert home in entries or not callable(getattr(module, name)), home
    for package in pkgutil.iter_modules(pallas_kernels.__path__, "pallas_kernels."):
        for name in getattr(import_module(package.name), "__all__", []) if package.ispkg else []:
            assert f"{package.name}.{name}" in entries
    assert "jpaged.integrations.tunix.JpagedRollout" in entries


def test_the_table_of_settings_is_that_of_their_fields():
    page = settings_table.PAGE.read_text()
    assert settings_table.filled(page) == page, "run: python scripts/settings_table.py --write"
    assert settings_table.table() in page


def test_tables_of_vllms_names_are_those_that_jpaged_reads():
    page = docs_vllm.PAGE.read_text()
    assert docs_vllm.fill(page) == page, "run: python scripts/docs_vllm.py --write"
    assert set(re.findall(r"<!-- table: (\w+) -->", page)) == set(docs_vllm.TABLES)


@pytest.mark.parametrize("page", sorted(DOCS))
def test_no_section_is_empty_in_the_file(page):
    text = re.sub(r"```.*?```", "(code)", (ROOT / "docs" / page).read_text(), flags=re.DOTALL)
    _, *parts = re.split(r"^(#+) (.+)$", re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL), flags=re.MULTILINE)
    for level, title, body, deeper in zip(parts[::3], parts[1::3], parts[2::3], [*parts[3::3], ""], strict=True):
        assert body.strip() or len(deeper) > len(level), title


def test_every_paper_that_the_code_names_by_number_is_on_the_page_of_papers():
    page = (ROOT / "docs" / "papers.md").read_text()
    folders = ("jpaged", "models", "pallas_kernels", "scripts")
    text = "".join(path.read_text() for folder in folders for path in (ROOT / folder).rglob("*.py"))
    named = set(re.findall(r"ar[xX]iv(?:\.org/abs/|:|[ \n]+)(\d{4}\.\d{5})", text))
    assert len(named) > 8 and sorted(number for number in named if number not in page) == []


def test_tables_are_not_broken_by_what_stands_in_them():
    """Every row of a table has as many cells as its head."""
    heads = 0
    for name in sorted(DOCS):
        rows = re.findall(r"^\|.*\|$", shown(name), re.MULTILINE)
        cells = 0
        for row in rows:
            count = len(re.findall(r"(?<!\\)\|", row))
            if re.fullmatch(r"[|\-: ]+", row) and "---" in row:
                heads += 1
                assert count == cells, row
            elif heads and cells and count != cells:
                assert rows.index(row) + 1 < len(rows) and set(rows[rows.index(row) + 1]) <= set("|-: "), row
            cells = count
    assert heads > 100


@pytest.mark.parametrize(
    ("name", "path", "number"),
    [
        ("adding_a_layer_kind.md", "tests/execution/caches/test_layer_cache.py", 4),
        ("adding_an_edit.md", "tests/execution/sampling/echo_penalty.py", 3),
    ],
)
def test_quoted_code_is_the_files(name, path, number):
    page = shown(name)
    assert "<!-- source" not in page
    blocks = [block.code for block in code_blocks(page)]
    source = (ROOT / path).read_text()
    assert len(blocks) == number and all(block in source for block in blocks)
    with pytest.raises(ValueError, match="has no Nonesuch"):
        docs_site.quoted("scripts/docs_site.py", "Nonesuch")


@pytest.mark.parametrize(
    ("link", "page", "there"),
    [
        ("serving.md#security", "index.md", "serving.md#security"),
        ("limits.md#images", "concepts.md", "limits.md#images"),
        ("../README.md#hardware", "concepts.md", "project/readme.md#hardware"),
        ("../CONTRIBUTING.md", "tpu_slice.md", "project/contributing.md"),
        ("docs/serving.md", "project/security.md", "../serving.md"),
        ("../jpaged/llm.py", "papers.md", "https://host/jpaged/blob/main/jpaged/llm.py"),
        ("https://example.org/x", "papers.md", "https://example.org/x"),
        ("#blocks", "concepts.md", "#blocks"),
        ("nonesuch.md", "concepts.md", "nonesuch.md"),
    ],
)
def test_a_link_leads_to_where_its_target_is_on_the_site(link, page, there):
    assert docs_site.site_page(page, f"[text]({link})", "https://host/jpaged/") == f"[text]({there})"


def test_without_an_address_of_the_repository_a_source_is_named_and_not_linked():
    assert docs_site.site_page("papers.md", "see [`llm.py`](../jpaged/llm.py).") == "see `llm.py`."
