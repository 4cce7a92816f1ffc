"""What a command meets outside: a full disk, a closed pipe, no network, a cache that cannot be written."""

import errno
import os
import subprocess
import sys
import warnings

import httpx
import huggingface_hub
import pytest
from typer.testing import CliRunner

from jpaged.cli.main import _COMMANDS, app, main
from jpaged.cli.options import CLOSED_PIPE

FULL = OSError(errno.ENOSPC, "No space left on device", "/disk/file")
REQUEST = '{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}'
PLACES = {
    "generate": (["hi"], "jpaged.llm.LLM"),
    "chat": ([], "jpaged.llm.LLM"),
    "serve": (["m", "--port", "0"], "jpaged.llm.LLM"),
    "run-batch": (["IN", "OUT"], "jpaged.llm.LLM"),
    "convert": (["m", "OUT"], "jpaged.loading.convert_checkpoint"),
    "quantize": (["m", "--out", "OUT"], "jpaged.loading.quantised_folder.quantise_folder"),
    "compile": (["m", "--out", "OUT"], "jpaged.LLM.compile_programs"),
    "plan": (["--model", "m", "--device", "cpu"], "jpaged.planning.plan"),
    "replay-step": (["IN"], "jpaged.engine.step_dump.replay_step"),
    "bench throughput": ([], "jpaged.cli.bench.make_requests"),
}
"""For each command, arguments and what fails in it."""


def process(*command, **options):
    return subprocess.run([sys.executable, "-m", "jpaged.cli.main", *command], stderr=subprocess.PIPE, **options)


def test_no_command_is_left_out():
    assert _COMMANDS.keys() <= PLACES.keys()


@pytest.mark.parametrize(("error", "status"), [(FULL, (1, 2)), (BrokenPipeError(), (CLOSED_PIPE,))])
@pytest.mark.parametrize("command", [name for name in PLACES if name != "bench throughput"])
def test_a_full_disk_is_one_line_and_a_closed_pipe_none(command, error, status, tmp_path, monkeypatch):
    arguments, place = PLACES[command]
    (tmp_path / "IN").write_text(REQUEST)

    def fails(*_, **__):
        raise error

    monkeypatch.setattr(place, fails)
    monkeypatch.setattr("jpaged.server.logs.configure_logs", lambda *_, **__: None)  # its log would outlive the test
    given = [str(tmp_path / one) if one in ("IN", "OUT") else one for one in arguments]
    result = CliRunner().invoke(app, [*command.split(), *given], input="hi\n")
    said = [line for line in result.output.splitlines() if "answered before" not in line]
    said = [line for line in said if not line.endswith(" ...")]  # what the command does, from jpaged.cli.waiting
    if error is FULL:
        assert result.exit_code in status and len(said) == 1, result.output
        assert said[0].startswith("Error: ") and "No space left on device" in said[0] and "/disk/file" in said[0]
    else:
        assert (result.exit_code, said) == (CLOSED_PIPE, [])


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_output_that_cannot_be_written_is_said_once_and_a_reader_that_went_is_not():
    with open("/dev/full", "w") as full:
        done = process("plan", "--list", stdout=full)
    assert (done.returncode, done.stderr) == (1, b"Error: [Errno 28] No space left on device\n")
    read, write = os.pipe()
    os.close(read)
    done = process("plan", "--list", stdout=write)
    os.close(write)
    assert (done.returncode, done.stderr) == (CLOSED_PIPE, b"")


LATE = """
import typer
from jpaged.cli.options import Command
app = typer.Typer()
@app.command(cls=Command)
def fails() -> None:
    print("half of an answer")
    raise OSError(28, "No space left on device", "report.json")
app()
"""


def test_what_was_printed_before_a_failure_elsewhere_is_not_lost():
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run([sys.executable, "-c", LATE], capture_output=True, env=buffered)
    assert (done.returncode, done.stdout) == (1, b"half of an answer\n")
    assert b"report.json" in done.stderr


def test_a_plan_without_a_network_asks_once_and_names_what_it_has(monkeypatch):
    asked = []

    class Unreachable:
        def head(self, url, **_):
            asked.append(url)
            raise httpx.ConnectError("Name or service not known")

    assert huggingface_hub.HfApi and huggingface_hub.hf_hub_download  # imported now, they keep the session of their own
    monkeypatch.setattr("huggingface_hub.utils.get_session", Unreachable)
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("waited to ask again"))
    for name in ("org/none", "none"):
        result = CliRunner().invoke(app, ["plan", "--model", name, "--device", "cpu"])
        said = " ".join(result.output.split())
        assert result.exit_code == 2 and "there is no internet" in said and "Name or service not known" in said
        options = {word.strip(".,;:()") for word in said.split() if word.startswith("--")}
        assert options <= set(CliRunner().invoke(app, ["plan", "--help"]).output.replace(",", " ").split())
        assert "_dir=" not in said
    assert len(asked) == 2


@pytest.mark.parametrize(("command", "said"), [("quantize", "the variable HF_HOME"), ("generate", "--download-dir or")])
def test_only_options_that_a_command_has_are_named(command, said, monkeypatch, tmp_path):
    text = "it is not there; download_dir= or the variable HF_HOME chooses where downloads are kept"

    def fails(*_, **__):
        raise ValueError(text)

    arguments, place = PLACES[command]
    monkeypatch.setattr(place, fails)
    given = [str(tmp_path / one) if one == "OUT" else one for one in arguments]
    output = CliRunner().invoke(app, [command, *given]).output
    assert f"there; {said}" in output and "_dir=" not in output


def test_warnings_of_one_cause_are_given_once_a_command(monkeypatch):
    shown = []
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)  # put back afterwards
    monkeypatch.setattr(warnings, "showwarning", lambda message, *_: shown.append(message))
    for number in (1, 2):
        main()
        for name in ("jit_a", "jit_b"):
            text = f"Error writing persistent compilation cache entry for '{name}': No space left on device"
            warnings.showwarning(UserWarning(text), UserWarning, "/lib/jax/compiler.py", 833)
        assert len(shown) == number
