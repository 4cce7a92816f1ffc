"""Other engines at the same arrivals: their processes, and the whole command on a tiny model."""

from __future__ import annotations

import json
import sys
import textwrap
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from jpaged.benchmarks.serving_real import peer_engine
from jpaged.benchmarks.serving_real.experiments import SEVERAL_KINDS
from jpaged.benchmarks.serving_real.peers import ENGINE, Peer, commands, started
from jpaged.benchmarks.serving_real.workload import Task
from jpaged.cli.main import app

FAKE = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("peer_engine", {str(ENGINE)!r})
engine = importlib.util.module_from_spec(spec)
spec.loader.exec_module(engine)

def fake(model, context, cache_gib):
    running = {{}}
    def add(number, prompt, output):
        running[number] = [0, output]
    def step():
        told = []
        for number, state in list(running.items()):
            state[0] += 1
            told.append((number, state[0]))
            if state[0] == state[1]:
                del running[number]
        if model == "fails":
            raise RuntimeError("out of memory")
        return told
    return add, step

engine.ENGINES["fake"] = fake
engine.main()
"""

needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="children are found by /proc")


@pytest.fixture
def fake(tmp_path):
    script = tmp_path / "fake.py"
    script.write_text(textwrap.dedent(FAKE), encoding="utf-8")
    return lambda model: [sys.executable, str(script), "fake", model, "128", "1"]


def test_requests_are_added_when_they_are_due_and_all_tokens_are_told():
    added, running = [], {}

    def add(number, prompt, output):
        added.append((number, prompt))
        running[number] = 0

    def step():
        for number in running:
            running[number] += 2  # more tokens than asked for are not counted
        return list(running.items())

    tasks = [{"prompt": [1, 2], "output": 3}, {"prompt": [3], "output": 4}]
    came = peer_engine.serve(add, step, tasks, [0.0, 0.01])
    assert [number for number, _ in added] == [0, 1]
    assert [len(times) for times in came] == [3, 4] and all(times == sorted(times) for times in came)
    assert came[1][0] >= 0.01


def test_an_engines_process_answers_run_after_run(fake):
    with started({"one": fake("fits"), "two": fake("fits")}) as peers:
        for peer in peers:
            for _ in range(2):
                first, second = peer.serve([Task("chat", (1, 2), 3), Task("chat", (1,), 5)], [0.0, 0.02])
                assert (first.output_tokens, second.output_tokens) == (3, 5)
                assert second.due == 0.02 <= second.token_times[0] <= second.ended


def test_an_engine_that_goes_on_but_says_nothing_more_is_ended(monkeypatch):
    monkeypatch.setattr("jpaged.benchmarks.serving_real.peers.LAST_SECONDS", 0.1)
    with pytest.raises(ValueError, match="the engine ended with status -9"):
        Peer("lingers", [sys.executable, "-c", "import os, time; os.close(1); time.sleep(600)"])


def starting_another(told, then):
    """Return a command that starts a process in a session of its own, writes its id to `told` and goes on so."""
    code = (
        "import os, pathlib, subprocess, sys, time; "
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True, "
        "stdout=subprocess.DEVNULL); "
        f"pathlib.Path({str(told)!r}).write_text(str(child.pid)); {then}; time.sleep(600)"
    )
    return [sys.executable, "-c", code]


def ends(process):
    stat = Path(f"/proc/{process}/stat")
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            if ") Z " in stat.read_text():
                return True
        except OSError:
            return True
        time.sleep(0.01)
    return False


@needs_proc
def test_what_an_engine_started_ends_with_it(tmp_path):
    peer = Peer("parent", starting_another(tmp_path / "child", "print('{}', flush=True)"))
    child = (tmp_path / "child").read_text()
    assert Path(f"/proc/{child}").exists()
    peer.close()
    assert ends(child)


@needs_proc
def test_what_an_engine_started_ends_with_one_that_says_nothing_more(tmp_path, monkeypatch):
    monkeypatch.setattr("jpaged.benchmarks.serving_real.peers.LAST_SECONDS", 0.1)
    with pytest.raises(ValueError, match="the engine ended with status -9"):
        Peer("lingers", starting_another(tmp_path / "child", "os.close(1)"))
    assert ends((tmp_path / "child").read_text())


def test_an_engine_that_ends_is_named_with_what_it_said_last(fake):
    with pytest.raises(ValueError, match=r"--env bad=DIR: the engine ended with status 3: .*\nno such weights$"):
        Peer("bad", [sys.executable, "-c", "import sys; print('no such weights', file=sys.stderr); sys.exit(3)"])
    with started({"one": fake("fails")}) as (peer,):
        with pytest.raises(ValueError, match="--env one=DIR: the engine ended"):
            peer.serve([Task("chat", (1,), 2)], [0.0])
        with pytest.raises(ValueError, match="--env one=DIR: the engine ended"):
            peer.serve([Task("chat", (1,), 2)], [0.0])


def test_environments_are_looked_at_before_anything_runs(tmp_path):
    with pytest.raises(ValueError, match=r"there is no .*python"):
        commands({"openvino": tmp_path}, None, 128)
    with pytest.raises(ValueError, match="needs --peer-model"):
        commands({"vllm": tmp_path}, None, 128)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    (made,) = commands({"vllm": tmp_path}, tmp_path, 128).values()
    assert made == [str(tmp_path / "bin" / "python"), str(ENGINE), "vllm", str(tmp_path), "128", "1"]


def test_the_command_measures_a_tiny_model_and_writes_everything(tmp_path):
    pytest.importorskip("matplotlib")
    out, docs = tmp_path / "figures.json", tmp_path / "docs"
    options = [
        "--quick",
        "--seeds",
        "1",
        "--share",
        "0.7",
        "--share",
        "1.4",
        "--results",
        str(out),
        "--docs",
        str(docs),
    ]
    done = CliRunner().invoke(app, ["bench", "serving", *options], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    found = json.loads(out.read_text(encoding="utf-8"))
    load = found["parts"]["load"]
    assert set(load["systems"]) == set(SEVERAL_KINDS)
    for system in load["systems"].values():
        assert system["saturation"] > 0
        assert [run["completed"] for run in system["runs"]] == [run["planned"] for run in system["runs"]]
    mechanisms = found["parts"]["mechanisms"]
    assert len(mechanisms["eviction"]) == 4 and len(mechanisms["chunking"]) == 3
    text = (docs / "serving-real.md").read_text(encoding="utf-8")
    assert "`jpaged bench serving --share 0.7 --share 1.4 --seeds 1 --quick --docs docs`" in text
    for kind in ("png", "svg"):
        assert (docs / f"serving-real-hybrid.{kind}").stat().st_size > 1000
    (docs / "serving-real.md").unlink()
    CliRunner().invoke(app, ["bench", "serving", *options], catch_exceptions=False)
    assert (docs / "serving-real.md").read_text(encoding="utf-8") == text, "what was kept is not measured again"
    part = [*options, "--part", "mechanisms", "--page", "serving-real-mechanisms"]
    CliRunner().invoke(app, ["bench", "serving", *part], catch_exceptions=False)
    alone = (docs / "serving-real-mechanisms.md").read_text(encoding="utf-8")
    assert "--part mechanisms --page serving-real-mechanisms" in alone and "Chunks of prompts" in alone
    assert "latency against rate" not in alone and (docs / "serving-real.md").read_text(encoding="utf-8") == text
    options[options.index("1.4")] = "1.5"
    done = CliRunner().invoke(app, ["bench", "serving", *options], env={"COLUMNS": "200", "TERMINAL_WIDTH": "200"})
    assert done.exit_code == 2 and "was measured with rates [0.7, 1.4], not [0.7, 1.5]" in " ".join(done.output.split())


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (("--results", "missing/real.json"), "there is no folder"),
        (("--page", "../elsewhere"), "--page ../elsewhere is not a file's name"),
    ],
)
def test_where_figures_go_is_looked_at_before_anything_runs(tmp_path, monkeypatch, option, said):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["bench", "serving", *option], env={"COLUMNS": "200", "TERMINAL_WIDTH": "200"})
    assert done.exit_code == 2 and said in " ".join(done.output.split())
