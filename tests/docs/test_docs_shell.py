"""The shell commands of README.md and docs/ run as they stand, or it is said why they do not; so for every other block.

A commit's tests run the blocks of `EACH_COMMIT`, those of the night all. Models are tiny ones under the names that the
pages use.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import docs_stand_ins
import pytest
import wanted
from commands import ROOT
from docs_markdown import CodeBlock, code_blocks, commands_of, shell_blocks
from docs_run import FILE
from docs_shell import REASONS, reason_of, run_block, run_lines

PAGES = ["README.md", *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))]
BLOCKS = [(page, block) for page in PAGES for block in shell_blocks((ROOT / page).read_text())]
EACH_COMMIT = ("curl localhost", ".venv/bin/jpaged generate")
"""What stands in the blocks that every commit runs: a server that answers, and a prompt."""
SHOWN = ("text",)
"""Languages of blocks that are not executed: what a command prints, or a formula."""
JPAGED = f"""#!{sys.executable}
from jpaged.loading import demo_model

demo_model.ALIAS = "not-a-model"  # so that the name is the folder's
from jpaged.cli.main import run

run()
"""


def params():
    for page, block in BLOCKS:
        if run_lines(block):
            soon = any(part in block.code for part in EACH_COMMIT)
            marks = () if soon else pytest.mark.nightly
            yield pytest.param(page, block, id=f"{page}:{block.line}", marks=marks)


@pytest.fixture(scope="module")
def here(tmp_path_factory) -> Path:
    """A folder with tiny models under the names of others."""
    folder = tmp_path_factory.mktemp("shell")
    docs_stand_ins.write(folder, docs_stand_ins.DEMO, *docs_stand_ins.SHELL)
    return folder


@pytest.fixture(scope="module")
def programs(tmp_path_factory) -> Path:
    """A folder with the program `jpaged` of this checkout."""
    folder = tmp_path_factory.mktemp("bin")
    (folder / "jpaged").write_text(JPAGED)
    (folder / "jpaged").chmod(0o755)
    return folder


@pytest.mark.parametrize(("page", "block"), params())
def test_the_commands_of_a_block_run(page, block, here, programs):
    if any(line.startswith("curl ") for line in run_lines(block)):
        wanted.program("curl")
    printed = run_block(block, here, programs)
    if "chat/completions" in block.code:
        assert json.loads(printed)["choices"][0]["message"]["content"]


def test_each_commit_runs_a_prompt_and_a_server_that_is_asked():
    soon = [param for param in params() if not param.marks]
    assert len(soon) == len(EACH_COMMIT)


def test_every_line_of_a_shell_runs_or_is_of_a_kind_that_does_not():
    """A line that runs begins with a program that there is: nothing but `jpaged` and what asks its server."""
    lines = [(page, line) for page, block in BLOCKS for line in run_lines(block)]
    assert len(lines) > 10
    unknown = [each for each in lines if not re.match(r"([A-Z_]+=\S+ )*(\.venv/bin/)?(jpaged|curl) ?", each[1])]
    assert unknown == []


def test_every_reason_is_a_sentence_of_something_that_stands_on_a_page():
    lines = [line for _, block in BLOCKS if block.not_run is None for line in commands_of(block)]
    assert [start for start in REASONS if not any(re.match(start, line) for line in lines)] == []
    reasons = [*REASONS.values(), *(block.not_run for _, block in BLOCKS if block.not_run)]
    for reason in reasons:
        assert len(reason.split()) >= 3, reason
        for file in re.findall(r"(?:tests|scripts)/[\w/]+\.(?:py|sh)", reason):
            assert (ROOT / file).is_file(), reason


@pytest.mark.parametrize("page", [*PAGES, "ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_every_fenced_block_runs_is_read_or_says_why_not(page):
    for block in code_blocks((ROOT / page).read_text()):
        if block.language == "json":
            json.loads(block.code)
        elif block.not_run is None and block.language not in ("python", "bash", *SHOWN):
            assert FILE.match(block.code), f"{page}:{block.line}: nothing runs a block of {block.language!r}"


def test_indented_and_fenced_blocks_are_read_with_their_comments_and_lines():
    page = (
        "# A page\n\n<!-- before: touch a -->\n\n    jpaged x \\\n      --y\n    curl z  # why\n\nText\n    and more"
        "\n\n<!-- not run: costs a fortune -->\n```bash\n$ gcloud\n```\n\n<!--\n\n    no command\n-->\n"
    )
    first, second = shell_blocks(page)
    assert (first.line, first.before, first.not_run) == (5, "touch a\n", None)
    assert commands_of(first) == ["jpaged x    --y", "curl z  # why"]
    assert (second.line, second.not_run, run_lines(second)) == (14, "costs a fortune", [])
    assert reason_of(first, "jpaged bench throughput") and reason_of(first, "jpaged x") is None


def test_a_command_that_fails_is_told_with_its_words(tmp_path):
    block = CodeBlock("bash", "echo so far\nfalse --nonesuch\n", 1, None)
    with pytest.raises(RuntimeError, match="'false --nonesuch' ended with 1"):
        run_block(block, tmp_path, tmp_path)
    assert run_block(CodeBlock("bash", "cat a\n", 1, None, "echo b > a"), tmp_path, tmp_path) == "b\n"


def test_a_server_that_ends_is_told_with_its_log(tmp_path):
    (tmp_path / "jpaged").write_text("#!/bin/sh\necho no such model\nexit 3\n")
    (tmp_path / "jpaged").chmod(0o755)
    with pytest.raises(RuntimeError, match="no such model"):
        run_block(CodeBlock("bash", "jpaged serve m\n", 1, None), tmp_path, tmp_path)
