"""What a command prints is the text that the model wrote."""

import os
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from jpaged.cli.main import app

WIDE = "a word " * 30
TEXT = f"\t:smile: [bold]x[/bold] \x1b[1mkept\x1b[0m \a\b\v\f\r {WIDE}end"


class Poet:
    """An engine that answers everything with `TEXT`, and refuses what asks for prose."""

    def __init__(self, model, **settings):
        self.control = SimpleNamespace(compilation_notes=nullcontext)

    def generate(self, prompts, params, on_error):
        return [SimpleNamespace(prompt=p, error=None, outputs=[SimpleNamespace(text=TEXT)]) for p in prompts]

    def stream(self, prompt, params):
        if prompt == "prose":  # a prompt is looked at before the stream begins
            raise ValueError("no prose")
        return self._stream(prompt)

    def _stream(self, prompt):
        yield SimpleNamespace(text=TEXT[:9])
        if prompt == "half a verse":
            raise ValueError("no halves")
        yield SimpleNamespace(text=TEXT[9:])


@pytest.mark.parametrize("flags", [[], ["--stream"]])
def test_a_pipe_reads_the_characters_that_the_model_wrote(flags, monkeypatch):
    monkeypatch.setattr("jpaged.llm.LLM", Poet)
    monkeypatch.setenv("COLUMNS", "80")
    prompt = f"a prompt:tada:\t{WIDE}"
    result = CliRunner().invoke(app, ["generate", prompt, *flags])
    assert result.exit_code == 0
    assert result.stdout_bytes.decode().removeprefix("\u2500" * 80 + "\n") == f"{prompt}{TEXT}\n"


@pytest.mark.parametrize(("prompt", "said"), [("prose", "no prose"), ("half a verse", "no halves")])
def test_what_a_stream_refuses_is_told_as_a_bad_parameter(monkeypatch, prompt, said):
    monkeypatch.setattr("jpaged.llm.LLM", Poet)
    result = CliRunner().invoke(app, ["generate", prompt, "--stream"])
    assert result.exit_code == 2 and said in result.stderr


@pytest.mark.parametrize("flags", [[], ["--stream"]])
def test_a_reader_that_has_seen_enough_ends_the_command_without_a_word(flags):
    code = (
        "import sys, types, test_printing; from jpaged.cli.main import app\n"
        "sys.modules['jpaged.llm'] = types.SimpleNamespace(LLM=test_printing.Poet)\n"
        f"app(['generate', 'Hello', *{flags!r}])"
    )
    read, write = os.pipe()
    os.close(read)
    paths = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=write, stderr=subprocess.PIPE, env=os.environ | {"PYTHONPATH": paths}
    )
    os.close(write)
    said = [line for line in done.stderr.splitlines() if not line.endswith(b" ...")]  # what the command does
    assert (done.returncode, said) == (141, [])
