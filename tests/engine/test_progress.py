"""The progress bar, and the notes on standard error, say what the engine does."""

from __future__ import annotations

import io
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from rich.console import Console

from jpaged.engine import progress
from jpaged.engine.generate import run_to_end
from jpaged.engine.progress import GenerationProgress, compilation_notes
from jpaged.engine.stats import Counters
from jpaged.execution.compile.buckets import Bucket
from jpaged.execution.compile.program import Compilations
from jpaged.scheduling import Status


def request(prompt=10, computed=0):
    return SimpleNamespace(prompt_token_ids=[1] * prompt, sequences=[SimpleNamespace(num_computed=computed)])


def drawn(progress):
    console = Console(file=io.StringIO(), width=140)
    console.print(progress._progress.get_renderable())
    return console.file.getvalue()


def test_it_says_compiling_while_a_program_is_compiled_and_generating_otherwise():
    compilations = Compilations()
    with GenerationProgress([request()] * 256, 256, Counters(), compilations.activity) as progress:
        compilations.begin("a step")
        assert "compiling program 1" in drawn(progress) and "0/256" in drawn(progress)
        compilations.end("a step", 1.0)
        assert "generating" in drawn(progress) and "compiling" not in drawn(progress)


def test_steps_and_tokens_are_those_of_the_call():
    stats = Counters(num_steps=1000, num_output_tokens=5000)
    progress = GenerationProgress([request()] * 2, 2, stats)
    stats.num_steps, stats.num_output_tokens = 1003, 5006
    progress.update(1)
    assert "1/2" in drawn(progress) and "6 output tokens" in drawn(progress) and "3 steps" in drawn(progress)


def test_one_long_prompt_shows_how_much_of_it_is_read():
    stats, long = Counters(num_steps=7), request(5000)
    progress = GenerationProgress([long], 1, stats)
    stats.num_steps, long.sequences[0].num_computed = 9, 1024
    assert progress.note() == "1,024 of 5,000 prompt tokens, 2 steps"
    stats.num_output_tokens = 1
    assert progress.note().startswith("1 output tokens, ")


@pytest.mark.parametrize("terminal", [True, False])
def test_a_caller_reads_which_program_it_waits_for(terminal, monkeypatch):
    written = io.StringIO()
    written.isatty = lambda: terminal
    monkeypatch.setattr(sys, "stderr", written)
    compilations = Compilations()
    with compilation_notes(compilations):
        for shape in ("a step", "another"):
            compilations.begin(shape)
            compilations.end(shape, 1.0)
    compilations.begin("after it")
    texts = [
        f"compiling program {i} ({shape}) and its kernels, {i - 1} s so far"
        for i, shape in ((1, "a step"), (2, "another"))
    ]
    if terminal:  # the line goes again, and the cursor is where it was
        assert written.getvalue() == "".join(f"\x1b7 {text}\x1b8\x1b[K" for text in texts)
    else:
        assert written.getvalue() == "".join(f"{text}\n" for text in texts)


def test_a_terminal_reads_how_long_a_program_has_taken_so_far(monkeypatch):
    written = io.StringIO()
    written.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", written)
    compilations = Compilations()
    with compilation_notes(compilations):
        compilations.begin(("step", Bucket(tokens=64, seqs=4, decode_only=False)))
        deadline = time.monotonic() + 20
        while "1 s so far" not in written.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
    first, *later = written.getvalue().removesuffix("\x1b8\x1b[K").split("\x1b8\x1b[K")
    assert first == "\x1b7 compiling program 1 (mixed step, 64 tokens) and its kernels, 0 s so far"
    assert "\x1b7 compiling program 1 (mixed step, 64 tokens) and its kernels, 1 s so far" in later


def test_a_batch_with_a_bar_names_each_program_where_there_is_no_terminal(capsys):
    compilations, part = Compilations(), request()
    part.request_id, part.status, part.all_requests = 0, Status.RUNNING, [part]

    def step():
        compilations.begin(("step", Bucket(tokens=4, seqs=4, decode_only=True)))
        compilations.end(("step", Bucket(tokens=4, seqs=4, decode_only=True)), 2.0)
        return [part]

    engine = SimpleNamespace(step=step, stats=Counters(), requests=SimpleNamespace(unfinished={0: part}))
    engine.runner = SimpleNamespace(worker=SimpleNamespace(compilations=compilations))
    run_to_end(engine, [part], show=True)
    assert "compiling program 1 (decode step, 4 tokens) and its kernels, 0 s so far\n" in capsys.readouterr().err
    run_to_end(engine, [part], show=False)
    assert capsys.readouterr().err == ""


def test_where_there_is_no_terminal_a_long_compilation_is_named_again(monkeypatch):
    class Stream(io.StringIO):
        def write(self, text):
            count = super().write(text)
            if self.getvalue().count("compiling program") >= 3:
                repeated.set()
            return count

    repeated, written = threading.Event(), Stream()
    monkeypatch.setattr("sys.stderr", written)
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.01)
    counts = Compilations()
    with compilation_notes(counts):
        counts.begin("step")
        assert repeated.wait(60)
        counts.end("step", 0.1)
    assert all("compiling program 1 (step)" in line for line in written.getvalue().splitlines())
