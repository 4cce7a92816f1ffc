"""The Python of README.md and docs/ runs as it stands, page by page, or says before it why it does not.

Blocks of a page run in order and in one namespace, as a reader would run them. ``smollm2-135m`` and other names of
models stand for a tiny random Llama with the demo model's tokenizer; at night for the demo model itself. What a block
needs that the page does not show stands in a comment before it: ``<!-- before: llm = LLM(...) -->``.
"""

from __future__ import annotations

import re
from pathlib import Path

import docs_stand_ins
import pytest
from commands import ROOT
from docs_run import python_blocks, run_block, run_page

from jpaged.loading import demo_model

PAGES = ["README.md", *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))]
PYTHON = {page: python_blocks((ROOT / page).read_text()) for page in PAGES}
RUN = [page for page in PAGES if any(block.not_run is None for block in PYTHON[page])]
MODELS = (docs_stand_ins.DEMO, *docs_stand_ins.HUB)
"""Names that blocks give to `LLM`."""


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """A folder in which the names of models are folders of a tiny one."""
    folder = tmp_path_factory.mktemp("models")
    docs_stand_ins.write(folder, *MODELS)
    return folder


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty folder, whose modules can be imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.parametrize("page", RUN)
def test_the_python_of_a_page_runs(page, models, here, monkeypatch):
    for name in {Path(name).parts[0] for name in MODELS}:
        (here / name).symlink_to(models / name)
    monkeypatch.setattr(demo_model, "ALIAS", "not-a-model")  # so that the name is the folder's
    run_page(page, PYTHON[page])


@pytest.mark.nightly
@pytest.mark.parametrize("page", RUN)
def test_the_python_of_a_page_runs_on_the_demo_model(page, models, here):
    (here / "Qwen").symlink_to(models / "Qwen")
    run_page(page, PYTHON[page])


def test_every_block_of_python_runs_or_says_why_not():
    counts = {page: len(blocks) for page, blocks in PYTHON.items() if blocks}
    assert counts["README.md"] >= 2 and counts["docs/generate.md"] >= 5 and sum(counts.values()) >= 15
    reasons = [(page, block.not_run) for page, blocks in PYTHON.items() for block in blocks if block.not_run]
    assert [(page, reason) for page, reason in reasons if len(reason.split()) < 4] == []
    for page, reason in reasons:
        for test in re.findall(r"tests/[\w/]+\.py", reason):
            assert (ROOT / test).is_file(), f"{page}: {reason}"


def test_blocks_name_no_model_that_has_no_stand_in():
    text = "".join(block.before + block.code for blocks in PYTHON.values() for block in blocks if block.not_run is None)
    named = set(re.findall(r'LLM\("([^"]+)"', text))
    assert set(MODELS) <= named <= {*MODELS, "tiny-gpt2"}


def test_a_block_that_fails_is_told_with_its_page_and_line():
    page = "# A page\n\n```python\nimport math\n\nmath.nonesuch\n```\n"
    (block,) = python_blocks(page)
    with pytest.raises(AttributeError) as caught:
        run_block("page.md", block, {})
    last = caught.traceback[-1]
    assert (Path(str(last.path)).name, last.lineno + 1) == ("page.md", 6)
