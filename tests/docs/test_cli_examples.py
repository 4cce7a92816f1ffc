"""Every command's help ends with examples, which it takes as they stand."""

from __future__ import annotations

import os

import pytest
from commands import parse_jpaged, root_command, walk
from typer.testing import CliRunner

from jpaged.cli.main import app

COMMANDS = dict(walk("jpaged", root_command()))


def shown(command) -> list[str]:
    return [line for line in (command.epilog or "").splitlines() if line.startswith("jpaged")]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_examples_that_it_takes(name):
    examples = shown(COMMANDS[name])
    assert examples
    for line in examples:
        assert line.split()[: len(name.split())] == name.split()
        parse_jpaged(line)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_each_example_on_a_line_of_its_own(name):
    """A terminal of 120 columns; in a narrower one long lines are broken."""
    environment = os.environ | {"COLUMNS": "120", "TERMINAL_WIDTH": "120"}
    result = CliRunner().invoke(app, [*name.split()[1:], "--help"], env=environment)
    lines = [line.strip() for line in result.output.splitlines()]
    assert result.exit_code == 0
    assert [line for line in shown(COMMANDS[name]) if line not in lines] == []


@pytest.mark.parametrize(
    "line", ["jpaged generate --max-tokns 4 Hi", "jpaged serve", "jpaged nonesuch", "jpaged plan --context many"]
)
def test_an_example_that_no_command_takes_is_found(line):
    with pytest.raises(Exception, match=r"No such|Missing|valid integer"):
        parse_jpaged(line)
