"""Every command's help ends with examples, which it takes as they stand."""

from __future__ import annotations

import os
import re

import pytest
from commands import parse_jpaged, root_command, walk
from typer.testing import CliRunner

from jpaged.cli.main import app

COMMANDS = dict(walk("jpaged", root_command()))


def shown(command) -> list[str]:
    lines = [line.strip() for line in (command.epilog or "").splitlines()]
    return [line for line in lines if line.startswith("jpaged")]


def help_of(name: str) -> str:
    """Return what a terminal of 80 columns shows."""
    environment = os.environ | {"COLUMNS": "80", "TERMINAL_WIDTH": "80"}
    result = CliRunner().invoke(app, [*name.split()[1:], "--help"], env=environment)
    assert result.exit_code == 0
    return result.output


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_examples_that_it_takes(name):
    examples = shown(COMMANDS[name])
    assert examples
    for line in examples:
        assert line.split()[: len(name.split())] == name.split()
        parse_jpaged(line)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_each_example_on_a_line_of_its_own(name):
    lines = [line.strip() for line in help_of(name).splitlines()]
    assert [line for line in shown(COMMANDS[name]) if line not in lines] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_the_names_of_options_whole_and_says_what_each_does(name):
    text = " ".join(help_of(name).split())
    for option in COMMANDS[name].params:
        if option.param_type_name == "option":
            assert all(re.search(rf"(^|[ /]){flag}([ ,]|$)", text) for flag in option.opts), option.name
            assert option.help and option.help.split()[0] in text, option.name


@pytest.mark.parametrize("name", ["jpaged", "jpaged bench"])
def test_a_list_of_commands_says_of_each_in_a_whole_sentence_what_it_does(name):
    lines = help_of(name).partition("Commands:")[2].partition("Example")[0].strip().splitlines()
    assert len(lines) == sum(not command.hidden for command in COMMANDS[name].commands.values())
    assert [line for line in lines if not re.fullmatch(r" *[\w-]+ {2,}[A-Z].*[^.]\.", line)] == []


@pytest.mark.parametrize(
    "line", ["jpaged generate --max-tokns 4 Hi", "jpaged serve", "jpaged nonesuch", "jpaged plan --context many"]
)
def test_an_example_that_no_command_takes_is_found(line):
    with pytest.raises(Exception, match=r"No such|Missing|valid integer"):
        parse_jpaged(line)
