"""Writes a table of the clients, their versions and what was tried; `--page` puts it into docs/compatibility.md.

The clients do not all go into one environment: each session tries those of its own, and adds them to the rows of the
sessions before, which are in the file that JPAGED_CLIENT_ROWS names.
"""

import json
import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[3] / "docs" / "compatibility.md"
BEGIN, END = "<!-- clients -->\n", "<!-- /clients -->"
ROWS: dict[tuple[str, str], dict[str, bool]] = {}


def pytest_addoption(parser):
    parser.addoption("--page", action="store_true", help="write the table into docs/compatibility.md")


def pytest_collection_modifyitems(config, items):
    """Leave out the clients of the other environments."""
    here = [item for item in items if is_here(item.get_closest_marker("client").args[0])]
    config.hook.pytest_deselected(items=[item for item in items if item not in here])
    items[:] = here


def is_here(package):
    """Whether this session's environment has a package of PyPI, or those of npm."""
    if package.endswith(" (npm)"):
        return "JPAGED_NPM" in os.environ
    try:
        return bool(version(package))
    except PackageNotFoundError:
        return False


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    report = (yield).get_result()
    if report.when == "call" or report.failed:
        package, tried = item.get_closest_marker("client").args
        ROWS.setdefault((package, version_of(package)), {})[tried] = report.passed


def version_of(package):
    """The installed version of a package of PyPI, or of "NAME (npm)"."""
    if not package.endswith(" (npm)"):
        return version(package)
    folder = Path(os.environ["JPAGED_NPM"]) / "node_modules" / package.removesuffix(" (npm)")
    return json.loads((folder / "package.json").read_text(encoding="utf-8"))["version"]


def pytest_configure(config):
    config.addinivalue_line("markers", "client(package, tried): the client of a test, and what it tries")


def pytest_terminal_summary(terminalreporter, config):
    file = Path(os.environ["JPAGED_CLIENT_ROWS"])
    before = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    for package, number, tried in before:
        ROWS[package, number] = tried | ROWS.get((package, number), {})
    file.write_text(json.dumps([[*key, tried] for key, tried in ROWS.items()]), encoding="utf-8")
    lines = ["| client | version | works | fails |", "|---|---|---|---|"]
    for (package, number), tried in sorted(ROWS.items()):
        works = ", ".join(what for what, passed in tried.items() if passed)
        fails = ", ".join(what for what, passed in tried.items() if not passed) or "-"
        lines.append(f"| {package} | {number} | {works} | {fails} |")
    terminalreporter.write("\n".join(["", *lines, ""]))
    if config.getoption("--page"):
        before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
        text = "\n".join(["", *lines, "", ""])
        PAGE.write_text(before + BEGIN + text + END + rest.split(END)[1], encoding="utf-8")
