"""Measures one model in each format of weights on this CPU, with other engines where they read the same file."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from jpaged.loading.quantised_folder import quantise_folder
from scripts.benchmarks.format_folders import BY_COMMAND, DEFINED, write_bfloat16, write_defined
from scripts.benchmarks.peers import Engine, environments_of, peer_variables, speed_of, start_engine, work_of
from scripts.cases import Row

BFLOAT16 = "bfloat16"
FOLDERS = (BFLOAT16, *BY_COMMAND, *DEFINED)
READ_BY = {
    "vllm": (
        BFLOAT16,
        "compressed-tensors, 4 bits",
        "awq, 4 bits",
        "gptq, 4 bits",
        "W4A16 with zero points",
        "W8A8",
        "FP8",
    ),
    "openvino": (),
    "llamacpp": (),
}
"""Engines -> the folders that they read; llama.cpp reads GGUF files, OpenVINO what its environment converted."""
CONVERTED = {"openvino-float32": "bfloat16", "openvino-int8": "int8"}
"""Models in OpenVINO's environment -> the form in which they are run."""
PROMPTS, PROMPT = 4, 512


class Trial(NamedTuple):
    """One engine with one form of the model: `run` is what engine.py calls the form."""

    form: str
    engine: str
    run: str
    source: Path
    python: str = sys.executable
    variables: dict[str, str] = {}  # noqa: RUF012 (never changed)


def formats(
    model: Path,
    env: list[str] = [],  # noqa: B006 (never changed)
    gguf: list[Path] = [],  # noqa: B006
    only: list[str] = list(FOLDERS),  # noqa: B006
    requests: int = 16,
    rounds: int = 2,
) -> Iterator[Row]:
    """Memory and speed of one model in each format, a process an engine and format, one after another (Linux).

    --model is a plain Hugging Face folder, of which the others are written; --gguf are files of the same model, --env
    NAME=DIR the environments of openvino, llamacpp and vllm, see peer_engines/environment.sh. "file" and "weights" are
    MiB stored and held, "load" is the peak of resident MiB while jpaged loads, "peak" that of the whole run, with 1 GiB
    for KV, summed over an engine's processes. "single" and "batch" are output tokens/s of one and of --requests
    requests, "prompts" tokens/s of reading four prompts of 512 tokens.

    Raises:
        ValueError: an unknown format or environment.
    """
    if unknown := set(only) - set(FOLDERS):
        raise ValueError(f"only={sorted(unknown)} are none of {', '.join(FOLDERS)}")
    environments = {name: Path(folder) for name, folder in environments_of(env, READ_BY).items()}
    work = work_of(model, requests, long=False)
    prompt = work["batch"][0]["prompt"] * PROMPT
    work["prompts"] = [{"prompt": prompt[start : start + PROMPT], "output": 1} for start in range(PROMPTS)]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "work.json"
        file.write_text(json.dumps(work))
        for trial in _trials(model, environments, gguf, only, Path(folder) / "model"):
            yield _row(trial, file, work, rounds)


def _trials(
    model: Path, environments: dict[str, Path], gguf: list[Path], only: list[str], folder: Path
) -> Iterator[Trial]:
    """Yield what is to be run; a form's folder is there until the next is asked for."""

    def of_peer(name: str, form: str, run: str, source: Path) -> Trial:
        env = environments[name]
        return Trial(
            form, name, run, source, str(env / "bin" / "python"), {"PYTHONPATH": ""} | peer_variables(name, env)
        )

    for form in only:
        write_form(form, model, folder)
        yield Trial(form, "jpaged", "stored", folder)
        yield from (of_peer(name, form, "stored", folder) for name in environments if form in READ_BY[name])
        shutil.rmtree(folder)
    for file in gguf:
        yield Trial(file.stem, "jpaged", "gguf", file)
        if "llamacpp" in environments:
            yield of_peer("llamacpp", file.stem, "gguf", file)
    if "openvino" in environments:
        for name, run in CONVERTED.items():
            yield of_peer("openvino", name, run, environments["openvino"] / "models" / name)


def write_form(form: str, model: Path, folder: Path) -> None:
    """Write a plain folder in one of `FOLDERS`."""
    if form == BFLOAT16:
        write_bfloat16(model, folder)
    elif form in BY_COMMAND:
        quantise_folder(model, folder, **BY_COMMAND[form])
    else:
        write_defined(DEFINED[form], model, folder)


def _row(trial: Trial, file: Path, work: dict[str, Any], rounds: int) -> Row:
    """Run a trial, and return its figures.

    Args:
        file: of `work`, the requests by their names.
    """
    row: Row = {"format": trial.form, "engine": trial.engine, "file MiB": _mib(_stored(trial.source))}
    row |= {"weights MiB": None, "load MiB": None}
    if trial.engine == "jpaged":
        row |= _loading(trial.source, "gguf" if trial.run == "gguf" else None)
    engine = start_engine(trial.engine, trial.run, "auto", trial.python, trial.source, file, trial.variables)
    if engine is None:
        return row | {"failed": True}
    _measure(engine, rounds)
    speeds = {
        order: None if engine.failed else speed_of(engine, order, work) for order in ("single", "batch", "prompts")
    }
    return row | {"peak MiB": _mib(engine.peak)} | speeds | {"failed": engine.failed}


def _measure(engine: Engine, rounds: int) -> None:
    try:
        for order in ("warm", "warm single", "prompts"):
            engine.run(order)
        engine.seconds.clear()
        for _ in range(rounds):
            for order in ("single", "batch", "prompts"):
                engine.run(order)
    finally:
        engine.signal(signal.SIGKILL)
        engine.process.wait()


def _loading(source: Path, quantization: str | None) -> Row:
    """Return what weights take while and after jpaged loads them, from the case loading-memory in its own process."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        command = [sys.executable, "-m", "scripts.benchmarks", "loading-memory", "--model", str(source)]
        command += ["--json", str(file), *(["--quantization", quantization] if quantization else [])]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        (found,) = json.loads(file.read_text())["rows"]
    return {"weights MiB": found["held MiB"], "load MiB": found["peak MiB"]}


def _stored(source: Path) -> int:
    """Return the bytes of a model's weights on disk."""
    if source.is_file():
        return source.stat().st_size
    return sum(file.stat().st_size for end in ("*.safetensors", "*.bin") for file in source.glob(end))


def _mib(number: int) -> float:
    return round(number / 2**20, 1)
