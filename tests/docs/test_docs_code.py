"""The Python of README.md and docs/ runs as it stands, page by page, or says before it why it does not.

Blocks of a page run in order and in one namespace, as a reader would run them. ``smollm2-135m`` and other names of
models stand for a tiny random Llama with the demo model's tokenizer; at night for the demo model itself. What a block
needs that the page does not show stands in a comment before it: ``<!-- before: llm = LLM(...) -->``.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from commands import ROOT
from docs_run import python_blocks, run_block, run_page
from transformers import LlamaConfig, LlamaForCausalLM

from jpaged.loading import demo_model
from jpaged.loading.gguf.reader import GGUFFile
from jpaged.loading.gguf.tokenizer import tokenizer_from_gguf

PAGES = ["README.md", *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))]
PYTHON = {page: python_blocks((ROOT / page).read_text()) for page in PAGES}
RUN = [page for page in PAGES if any(block.not_run is None for block in PYTHON[page])]
MODELS = ("smollm2-135m", "Qwen/Qwen3-Embedding-0.6B")
"""Names that blocks give to `LLM`."""


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """A folder in which the names of models are folders of a tiny one."""
    folder = tmp_path_factory.mktemp("models")
    tokenizer = tokenizer_from_gguf(GGUFFile(demo_model.fetch_demo_model()))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=2048,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    for name in MODELS:
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
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
    assert counts["README.md"] >= 5 and sum(counts.values()) >= 10
    reasons = [(page, block.not_run) for page, blocks in PYTHON.items() for block in blocks if block.not_run]
    assert [(page, reason) for page, reason in reasons if len(reason.split()) < 4] == []
    for page, reason in reasons:
        for test in re.findall(r"tests/[\w/]+\.py", reason):
            assert (ROOT / test).is_file(), f"{page}: {reason}"


def test_a_block_that_fails_is_told_with_its_page_and_line():
    page = "# A page\n\n```python\nimport math\n\nmath.nonesuch\n```\n"
    (block,) = python_blocks(page)
    with pytest.raises(AttributeError) as caught:
        run_block("page.md", block, {})
    last = caught.traceback[-1]
    assert (Path(str(last.path)).name, last.lineno + 1) == ("page.md", 6)
