"""The shell commands of README.md, CONTRIBUTING.md and docs/ name commands, scripts and options that exist."""

from __future__ import annotations

import re
import shlex
import tomllib

import pytest
from commands import ROOT, flags, parse_jpaged, script_of
from docs_markdown import code_blocks, command_lines

from scripts.benchmarks.registry import BENCHMARKS
from scripts.compiled_code.registry import COMPILED

PAGES = ["README.md", "CONTRIBUTING.md", *sorted(p.relative_to(ROOT).as_posix() for p in (ROOT / "docs").glob("*.md"))]
COMMANDS = [(page, line) for page in PAGES for line in command_lines((ROOT / page).read_text())]
INLINE = [
    (page, " ".join(span.split()))
    for page in PAGES
    for span in re.findall(r"(?<!`)`(jpaged [^`]+)`(?!`)", (ROOT / page).read_text())
    if "..." not in span and not span.endswith("--help") and span != "jpaged bench"
]
JPAGED = [(page, line) for page, line in COMMANDS if re.match(r"(\S+=\S+ )*(\S*/)?jpaged ", line)]
SCRIPTS = [(page, line) for page, line in COMMANDS if script_of(line) is not None]
CASES = [
    (page, cases, line.partition(f"{cases.package} ")[2])
    for cases in (BENCHMARKS, COMPILED)
    for page, line in COMMANDS
    if f"-m {cases.package} " in line
]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def test_commands_are_found():
    assert len(JPAGED) > 20 and len(SCRIPTS) > 5 and len(CASES) > 20 and len(INLINE) > 20


@pytest.mark.parametrize(("page", "line"), JPAGED, ids=lambda value: value[:60])
def test_jpaged_takes_the_line(page, line):
    parse_jpaged(line[re.search(r"(^| |/)jpaged ", line).end() - len("jpaged ") :])


@pytest.mark.parametrize(("page", "line"), INLINE, ids=lambda value: value[:60])
def test_jpaged_takes_what_is_named_within_a_sentence(page, line):
    """It may leave arguments out (`jpaged serve`, `jpaged compile --device`), but name none that is not taken."""
    try:
        parse_jpaged(line)
    except Exception as error:
        assert "Missing " in str(error) or "requires an argument" in str(error), f"{page}: {error}"


@pytest.mark.parametrize(("page", "line"), SCRIPTS, ids=lambda value: value[:60])
def test_a_script_exists_and_knows_the_options_that_it_is_given(page, line):
    script = script_of(line)
    assert script.is_file(), page
    text = script.read_text()
    words = shlex.split(line, comments=True)
    inner = flags(shlex.join(words[words.index(script.relative_to(ROOT).as_posix()) + 1 :]))
    if "typer" in text or "argparse" in text:
        for flag in inner:
            parameter = flag.removeprefix("--").replace("-", "_")
            assert flag in text or parameter in text, f"{page}: {script.name} has no {flag}"
    elif "$@" not in text:
        assert inner == [], page


@pytest.mark.parametrize(("page", "cases", "line"), CASES, ids=lambda value: str(value)[:60])
def test_a_case_exists_and_knows_the_options_that_it_is_given(page, cases, line):
    case, *options = shlex.split(line, comments=True)
    cases.parser_of(case).parse_args(options)


def test_extras_that_are_installed_exist():
    named = {
        extra
        for page, line in COMMANDS
        for group in re.findall(r'pip install .*?"[^"\[]*\[([\w,]+)\]', line)
        for extra in group.split(",")
    }
    assert {"cpu", "serve", "tpu"} <= named <= set(EXTRAS)


def test_the_readme_names_what_a_newcomer_runs():
    page = (ROOT / "README.md").read_text()
    for command in (
        "bash scripts/demo.sh",
        "bash scripts/test.sh",
        "`jpaged chat`",
        "jpaged serve smollm2-135m",
    ):
        assert command in page, command
    (client,) = [block.code for block in code_blocks(page) if "OpenAI" in block.code]
    assert "temperature=0)" in client, "else an answer is another one each time"


def test_tests_that_are_run_exist():
    for page, line in COMMANDS:
        for name in re.findall(r"pytest.* (tests/[\w/.]+)", line):
            assert (ROOT / name).exists(), f"{page}: {line}"


def test_continued_lines_and_comments_are_read_as_a_shell_does():
    page = "Text:\n\n    jpaged serve m \\\n      --port 1   # why\n    # nothing\n\n```bash\n$ bash x.sh\n```\n"
    assert command_lines(page) == ["jpaged serve m    --port 1   # why", "bash x.sh"]
