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
from typing import Any

from jpaged.loading.quantised_folder import quantise_folder
from scripts.benchmarks.format_folders import BY_COMMAND, DEFINED, write_bfloat16, write_defined
from scripts.benchmarks.peers import Engine, peer_variables, speed_of, start_engine, work_of
from scripts.cases import Row

BFLOAT16 = "bfloat16"
FOLDERS = (BFLOAT16, *BY_COMMAND, *DEFINED)
READ_BY = {
    "vllm": (BFLOAT16, "compressed-tensors, 4 bits", "awq, 4 bits", "gptq, 4 bits", "W4A16 with zero points", "W8A8"),
    "openvino": (),
    "llamacpp": (),
}
"""Engines -> the folders that they read; llama.cpp reads GGUF files, OpenVINO what its environment converted."""
CONVERTED = {"openvino-float32": "bfloat16", "openvino-int8": "int8"}
"""Models in OpenVINO's environment -> the form in which they are run."""
PROMPTS, PROMPT = 4, 512


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
    MiB stored and held, "load" is the peak of resident MiB while jpaged loads, "peak" that of the whole run with 1 GiB
    for KV. "single" and "batch" are output tokens/s of one and of --requests requests, "prompts" tokens/s of reading
    four prompts of 512 tokens.

    Raises:
        ValueError: an unknown format or environment.
    """
    if unknown := set(only) - set(FOLDERS):
        raise ValueError(f"only={sorted(unknown)} are none of {', '.join(FOLDERS)}")
    environments = {name: Path(folder) for name, _, folder in (entry.partition("=") for entry in env)}
    if unknown := environments.keys() - READ_BY.keys():
        raise ValueError(f"env={sorted(unknown)} are none of {', '.join(READ_BY)}")
    work = work_of(model, requests, long=False)
    work["prompts"] = [{"prompt": (work["batch"][0]["prompt"] * PROMPT)[n : n + PROMPT], "output": 1} for n in range(4)]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "work.json"
        file.write_text(json.dumps(work))
        for form in only:
            source = Path(folder) / "model"
            write_form(form, model, source)
            yield _row(form, "jpaged", "stored", sys.executable, source, file, work, {}, rounds)
            for name in (name for name in environments if form in READ_BY[name]):
                yield _of_peer(name, form, "stored", environments[name], source, file, work, rounds)
            shutil.rmtree(source)
        for source in gguf:
            yield _row(source.stem, "jpaged", "gguf", sys.executable, source, file, work, {}, rounds)
            if "llamacpp" in environments:
                yield _of_peer("llamacpp", source.stem, "gguf", environments["llamacpp"], source, file, work, rounds)
        for name, form in CONVERTED.items() if "openvino" in environments else ():
            source = environments["openvino"] / "models" / name
            yield _of_peer("openvino", name, form, environments["openvino"], source, file, work, rounds)


def write_form(form: str, model: Path, folder: Path) -> None:
    """Write a plain folder in one of `FOLDERS`."""
    if form == BFLOAT16:
        write_bfloat16(model, folder)
    elif form in BY_COMMAND:
        quantise_folder(model, folder, **BY_COMMAND[form])
    else:
        write_defined(DEFINED[form], model, folder)


def _of_peer(
    name: str, form: str, run: str, env: Path, source: Path, file: Path, work: dict[str, Any], rounds: int
) -> Row:
    variables = {"PYTHONPATH": ""} | peer_variables(name, env)
    return _row(form, name, run, str(env / "bin" / "python"), source, file, work, variables, rounds)


def _row(
    form: str,
    name: str,
    run: str,
    python: str,
    source: Path,
    file: Path,
    work: dict[str, Any],
    variables: dict[str, str],
    rounds: int,
) -> Row:
    """Run one engine with one source, and return its figures."""
    row: Row = {
        "format": form,
        "engine": name,
        "file MiB": _mib(_stored(source)),
        "weights MiB": None,
        "load MiB": None,
    }
    if name == "jpaged":
        row |= _loading(source, "gguf" if run == "gguf" else None)
    engine = start_engine(name, run, "auto", python, source, file, variables)
    if engine is not None:
        _measure(engine, rounds)
    failed = engine is None or engine.failed
    row["peak MiB"] = None if engine is None else _mib(engine.peak)
    for order in ("single", "batch", "prompts"):
        row[order] = None if engine is None or failed else speed_of(engine, order, work)
    return row | {"failed": failed}


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
