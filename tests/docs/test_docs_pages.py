"""Each of the site's pages has its place, what follows from the code is whole, and links lead to what is there."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import docs_api
import docs_cli
import docs_llms
import docs_pages
import docs_vllm
import pytest
from commands import ROOT
from docs_markdown import code_blocks, section, title_and_summary

import jpaged
from jpaged import vllm_compat
from jpaged.config import EngineConfig
from jpaged.vllm_compat import engine_settings, missing_attribute

NAV = [page for _, page in docs_llms.nav(docs_llms.settings()["nav"])]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """All pages as they are laid out."""
    folder = tmp_path_factory.mktemp("site") / "docs"
    docs_pages.write(folder)
    return folder


def test_every_page_has_one_place_in_the_navigation(site):
    assert len(NAV) == len(set(NAV))
    assert set(NAV) == {path.relative_to(site).as_posix() for path in site.rglob("*.md")}


def test_every_public_name_is_in_the_reference():
    text = "".join(make() for make in docs_api.PAGES.values())
    entries = set(re.findall(r"^::: (\S+)$", text, re.MULTILINE))
    for name, home in docs_api.homes().items():
        assert f"{home}.{name}" in entries, name
        assert f"[`{name}`]" in docs_api.index()
    assert {name for name in jpaged.__all__ if name != "__version__"} == set(docs_api.homes())
    assert "pallas_kernels.paged_attention.paged_attention" in entries
    assert sum(entry.startswith("jpaged.model_api.") for entry in entries) > 15
    assert {"jpaged.training.logprobs", "jpaged.integrations.tunix.JpagedRollout"} <= entries
    assert {"jpaged.planning.plan", "jpaged.planning.compile_programs_for"} <= entries


def test_every_setting_of_vllm_is_in_the_page_that_compares():
    page = docs_vllm.fill((ROOT / "docs" / "from_vllm.md").read_text())
    assert "<!-- table" not in page
    for name in [*vllm_compat._INSTEAD, *vllm_compat._ALWAYS, *vllm_compat.aliases(EngineConfig), *_settings()]:
        assert f"| `{name}` |" in page, name
    for name, text in vllm_compat._INSTEAD.items():
        with pytest.raises(ValueError, match=re.escape(text)):
            engine_settings({name: object()}, EngineConfig)
    for name in vllm_compat._ATTRIBUTES:
        assert f"| `LLM.{name}` |" in page and missing_attribute("LLM", name).split(": ", 1)[1] in page


def _settings():
    return [field.name for field in dataclasses.fields(EngineConfig) if field.name != "model"]


def test_the_command_line_page_has_every_command_with_its_options_and_examples():
    page = docs_cli.page()
    for name, command in docs_cli.commands():
        assert f"## `{name}`" in page
        for option in command.params:
            assert option.param_type_name == "argument" or f"`{option.opts[0]}`" in page or option.name == "help"
        assert docs_cli.examples(command)
        assert all(line in page for line in docs_cli.examples(command))


def test_every_paper_that_the_code_names_by_number_is_on_the_page_of_papers():
    page = (ROOT / "docs" / "papers.md").read_text()
    folders = ("jpaged", "models", "pallas_kernels", "scripts")
    text = "".join(path.read_text() for folder in folders for path in (ROOT / folder).rglob("*.py"))
    named = set(re.findall(r"ar[xX]iv(?:\.org/abs/|:|[ \n]+)(\d{4}\.\d{5})", text))
    assert len(named) > 8 and sorted(number for number in named if number not in page) == []


def test_tables_are_not_broken_by_what_stands_in_them(site):
    """Every row of a table has as many cells as its head."""
    for name in ("from_vllm.md", "cli.md", "api/index.md", "papers.md"):
        rows = re.findall(r"^\|.*\|$", (site / name).read_text(), re.MULTILINE)
        heads, cells = 0, 0
        for row in rows:
            count = len(re.findall(r"(?<!\\)\|", row))
            if re.fullmatch(r"[|\- ]+", row) and "---" in row:
                heads += 1
                assert count == cells, row
            elif heads and cells and count != cells:
                assert rows.index(row) + 1 < len(rows) and set(rows[rows.index(row) + 1]) <= set("|- "), row
            cells = count
        assert heads


def test_quoted_code_is_the_files(site):
    page = (site / "adding_a_layer_kind.md").read_text()
    assert "<!-- source" not in page
    blocks = [block.code for block in code_blocks(page)]
    source = (ROOT / "tests" / "execution" / "caches" / "test_layer_cache.py").read_text()
    assert len(blocks) == 4 and all(block in source for block in blocks)
    with pytest.raises(ValueError, match="has no Nonesuch"):
        docs_pages.quoted("scripts/docs_pages.py", "Nonesuch")


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
    assert docs_pages.site_page(page, f"[text]({link})", "https://host/jpaged/") == f"[text]({there})"


def test_without_an_address_of_the_repository_a_source_is_named_and_not_linked():
    assert docs_pages.site_page("papers.md", "see [`llm.py`](../jpaged/llm.py).") == "see `llm.py`."


def test_llms_txt_names_every_page_with_a_sentence(site, tmp_path, monkeypatch):
    monkeypatch.setenv("DOCS_SITE_URL", "https://host/")
    docs_llms.write(site, tmp_path)
    text = (tmp_path / "llms.txt").read_text()
    assert text.startswith("# jpaged\n\n> ")
    lines = re.findall(r"^- \[(.+?)\]\(https://host/(.+?)\.html\)(: .+)?$", text, re.MULTILINE)
    assert [page for _, page, _ in lines] == [name.removesuffix(".md") for name in NAV]
    assert [title for title, _, sentence in lines if not sentence] in ([], ["Changelog"])
    assert "block table" in (tmp_path / "llms-full.txt").read_text()


def test_sections_and_summaries_of_a_page():
    page = "# Title\n\nFirst [sentence](x.md), of two. Second.\n\n## One\n\nText.\n\n## Two\n\nMore.\n"
    assert section(page, "One") == "Text.\n" and section(page, "Two") == "More.\n"
    assert title_and_summary(page) == ("Title", "First sentence, of two.")
    with pytest.raises(ValueError, match="no heading 'Three'"):
        section(page, "Three")
