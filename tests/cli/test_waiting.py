"""A command says at once what it does, goes on saying it, and refuses what it can before it imports JAX."""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import sys
import threading

import pytest
import typer

from jpaged.cli import waiting as module
from jpaged.cli.main import app
from jpaged.cli.waiting import PROGRESS, waiting

NO_MODEL = ["--model", "./no-such-model"]
REFUSED = {
    "generate": [
        [],
        ["hi", "--top-p", "3"],
        ["hi", "--stream", "--n", "2"],
        ["hi", "--file", "no-such-file"],
        ["hi", *NO_MODEL],
        ["hi", "--model", "/no-such-folder/model.gguf"],
        ["hi", "--model", "."],
        ["hi", "--dtype", "float31"],
        ["hi", "--swap-space", "1"],
        ["hi", "--block-size", "12"],
        ["hi", "--max-loras", "2"],
        ["hi", "--kv-cache-dtype", "int3"],
        ["hi", "--quantization", "int5"],
    ],
    "chat": [NO_MODEL, ["--temperature", "-1"], ["--memory-utilization", "2"], ["--max-model-len", "0"]],
    "convert": [["./no-such-model", "new"], ["smollm2-135m", "."], ["smollm2-135m", "new", "--quantization", "int5"]],
    "quantize": [
        ["./no-such-model", "--out", "new"],
        ["smollm2-135m", "--out", "."],
        ["smollm2-135m", "--out", "new", "--format", "awkward"],
        ["smollm2-135m", "--out", "new", "--bits", "5"],
        ["smollm2-135m", "--out", "new", "--group-size", "48"],
    ],
    "serve": [
        ["./no-such-model"],
        ["smollm2-135m", "--port", "BUSY"],
        ["smollm2-135m", "--port", "70000"],
        ["smollm2-135m", "--host", "0.0.0.0"],
        ["smollm2-135m", "--tool-parser", "hermess"],
        ["smollm2-135m", "--reasoning-parser", "thinks"],
        ["smollm2-135m", "--save-every", "3"],
        ["smollm2-135m", "--log-level", "loud"],
        ["smollm2-135m", "--log-format", "xml"],
        ["smollm2-135m", "--ssl-certfile", "."],
        ["smollm2-135m", "--request-timeout", "-1"],
        ["smollm2-135m", "--preemption-mode", "sometimes"],
        ["smollm2-135m", "--enforce-eager"],
    ],
    "run-batch": [
        ["no-such-file", "out"],
        ["FILE", "no-such-folder/out"],
        ["FILE", "FILE"],
        ["FILE", "out", "--tool-parser", "hermess"],
        ["FILE", "out", *NO_MODEL],
    ],
    "plan": [
        [],
        ["--model", "smollm2-135m", "--device", "v5e8"],
        [*NO_MODEL, "--device", "v5e-8"],
        ["--model", "smollm2-135m", "--device", "v5e-8", "--dtype", "float31"],
        ["--model", "smollm2-135m", "--device", "v5e-8", "--compiler-env", "no-such-folder"],
    ],
    "compile": [
        ["./no-such-model", "--out", "new"],
        ["smollm2-135m", "--out", "FILE"],
        ["smollm2-135m", "--out", "new", "--device", "v5e8"],
        ["smollm2-135m", "--out", "new", "--compiler-env", "."],
        ["smollm2-135m", "--out", "new", "--enforce-eager"],
    ],
    "replay-step": [["no-such-file"], ["."]],
    "eval": [[]],
    "bench throughput": [NO_MODEL, ["--num-prompts", "0"], ["--dtype", "float31"]],
    "bench serve": [["--endpoint", "chats"], ["--arrivals", "even"], ["--out", "no-such-folder/out.json"]],
}
"""Command lines that are refused without JAX, by command."""
SCRIPT = """
import json, sys
from typer.testing import CliRunner

class NoJax:
    def find_spec(self, name, path=None, target=None):
        if name in ("jax", "jaxlib"):
            raise RuntimeError("jax was imported")

sys.meta_path.insert(0, NoJax())
from jpaged.cli.main import app
found = []
for arguments in json.load(sys.stdin):
    result = CliRunner().invoke(app, arguments)
    lines = result.output.strip().splitlines()
    found.append([arguments, result.exit_code, lines, repr(result.exception)])
json.dump(found, sys.stdout)
"""


SAYING = {
    "generate": ["hi"],
    "chat": [],
    "convert": ["smollm2-135m", "new"],
    "quantize": ["smollm2-135m", "--out", "new"],
    "serve": ["smollm2-135m", "--port", "0"],
    "run-batch": ["FILE", "out"],
    "plan": ["--model", "smollm2-135m", "--device", "v5e-8"],
    "compile": ["smollm2-135m", "--out", "new"],
    "replay-step": ["FILE"],
    "bench throughput": [],
}
"""Command lines that need JAX; `eval` needs a library too, and `bench serve` never JAX."""


def commands(group: typer.Typer, before: str = "") -> set[str]:
    found = {before + str(command.name or command.callback.__name__) for command in group.registered_commands}
    for inner in group.registered_groups:
        found |= commands(inner.typer_instance, f"{before}{inner.name} ")
    return found


def ran(cases, folder, words):
    """What the command lines gave in one process that has no JAX."""
    file = folder / "requests.jsonl"
    file.write_text('{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}}\n')
    words = {**words, "FILE": str(file)}
    several = {command: given if given and isinstance(given[0], list) else [given] for command, given in cases.items()}
    lines = [
        [*command.split(), *(words.get(word, word) for word in rest)]
        for command, each in several.items()
        for rest in each
    ]
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        input=json.dumps(lines),
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=300,
        check=True,
    )
    return json.loads(process.stdout)


def test_every_command_refuses_what_it_can_before_jax_is_imported(tmp_path):
    assert set(REFUSED) == commands(app), "each command has cases"
    with socket.create_server(("127.0.0.1", 0)) as busy:
        found = ran(REFUSED, tmp_path, {"BUSY": str(busy.getsockname()[1])})
    for arguments, status, output, exception in found:
        assert status == 2, (arguments, output, exception)
        errors = [line for line in output if line.startswith("Error: ")]
        assert len(errors) == 1, (arguments, output)


def test_every_command_says_what_it_does_before_jax_is_imported(tmp_path):
    assert set(SAYING) == commands(app) - {"eval", "bench serve"}
    for arguments, status, output, exception in ran(SAYING, tmp_path, {}):
        assert status in (1, 3) and "jax was imported" in exception + str(output), (arguments, output, exception)
        said = [line for line in output if "importing JAX" in line]
        assert len(said) == 1, (arguments, output)


@pytest.fixture
def quick(monkeypatch):
    """A second of silence is over at once."""
    monkeypatch.setattr(module, "INTERVAL", 0.0)


def test_what_a_command_waits_for_is_written_to_standard_error_as_it_begins(capsys):
    with waiting("loading m: importing JAX"):
        assert capsys.readouterr() == ("", "Loading m: importing JAX ...\n")
        PROGRESS.info("reading %s", "m.gguf")
        assert capsys.readouterr() == ("", "Reading m.gguf ...\n")
    PROGRESS.info("reading another")
    assert capsys.readouterr() == ("", ""), "a library says nothing by itself"


def test_it_is_said_again_while_it_goes_on(quick, capsys):
    said = threading.Event()

    class Hearing(logging.Handler):
        def emit(self, record):
            if record.getMessage().startswith("still reading, "):
                said.set()

    hearing = Hearing()
    with waiting("loading"):
        PROGRESS.info("reading")
        PROGRESS.addHandler(hearing)
        assert said.wait(60)
    PROGRESS.removeHandler(hearing)
    assert "Still reading, 0 s so far ...\n" in capsys.readouterr().err.replace("1 s", "0 s")
    assert not [thread for thread in threading.enumerate() if thread.name == "jpaged-waiting" and thread.is_alive()]


def test_where_there_is_a_log_it_has_the_lines_and_standard_error_has_none(caplog, capsys):
    with caplog.at_level(logging.INFO, "jpaged"), waiting("loading m", logs=True):
        PROGRESS.info("reading")
    assert caplog.messages == ["loading m", "reading"]
    assert capsys.readouterr() == ("", "")


def test_an_error_ends_it():
    with pytest.raises(ValueError, match="no such model"), waiting("loading"):
        raise ValueError("no such model")
    assert PROGRESS.propagate and PROGRESS.level == logging.NOTSET
