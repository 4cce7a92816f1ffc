"""Measures pictures in jpaged and other engines on this CPU: the same pictures and questions, in turn."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scripts.benchmarks.peers import OF_PEERS, Engine, environments_of, peer_variables, start_engine
from scripts.benchmarks.pictures import BEGIN, END, IMAGE, MERGE, drawn, write_qwen
from scripts.cases import Rows

PEERS = tuple(name for name in OF_PEERS if name != "jpaged")
_SCRIPTS = Path(__file__).parent / "peer_engines"
_ENGINE = _SCRIPTS / "picture_engine.py"


def picture_peers(
    env: list[str] = [],  # noqa: B006 (never changed)
    patches: list[int] = [256, 1024, 4096],  # noqa: B006
    text: list[int] = [512, 6],  # noqa: B006
    tower: list[int] = [1024, 24],  # noqa: B006
    questions: int = 8,
    tokens: int = 8,
    rounds: int = 3,
) -> Rows:
    """Seconds to a first token after a picture, and of questions on one picture, in jpaged and other engines.

    The model is a Qwen3-VL of random numbers in float32; --text and --tower are widths and numbers of layers; the tower
    is by default that of Qwen3-VL 2B and 4B. --env has NAME=DIR of environments of openvino, llamacpp and vllm, which
    peer_engines/environment.sh makes. All get the same new pictures each round, and each keeps what it can of a picture
    for the next question. "times" is the median of the rounds' ratios, the peer's seconds over jpaged's; the first
    round, which compiles, is left out. Each question has 16 tokens, and its answer --tokens.

    Raises:
        ValueError: an environment is not known.
    """
    environments = environments_of(env, PEERS)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        write_qwen(folder / "model", max(patches), text, tower)
        write_tokenizer(folder / "model")
        orders = [f"{measure}, {number}" for number in patches for measure in ("first token", "questions")]
        work = dict(_work(folder, patches, questions, tokens, rounds + 1))
        file = folder / "work.json"
        file.write_text(json.dumps(work))
        engines: list[Engine] = []
        try:
            for name, python, source in _sources(folder, environments):
                variables = {"PYTHONPATH": ""} | peer_variables(name, Path(python).parents[1]) if name in PEERS else {}
                if engine := start_engine(name, "float32", "auto", python, source, file, variables, _ENGINE):
                    engine.signal(signal.SIGSTOP)
                    engines.append(engine)
            for turn in range(rounds + 1):
                for order in orders:
                    for engine in engines[:: 1 if turn % 2 else -1]:
                        engine.run(f"{order}, {turn}")
        finally:
            for engine in engines:
                engine.signal(signal.SIGKILL)
                engine.process.wait()
    return [_row(engine, engines[0], order, rounds) for order in orders for engine in engines]


def _row(engine: Engine, own: Engine, order: str, rounds: int) -> dict[str, Any]:
    keys = [f"{order}, {turn}" for turn in range(1, rounds + 1)]
    row = {"engine": engine.name, "measure": order, "failed": engine.failed, "load": os.getloadavg()[0]}
    if engine.failed or own.failed:
        return row
    spent, ours = ([side.seconds[key][0] for key in keys] for side in (engine, own))
    times = statistics.median(one / other for one, other in zip(spent, ours, strict=True))
    return row | {"seconds": statistics.median(spent), "times": times}


def _work(
    folder: Path, patches: Sequence[int], questions: int, tokens: int, rounds: int
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield the requests of each order, with pictures of their own."""
    for number in patches:
        for turn in range(rounds):
            for measure, asked, output in (("first token", 1, 1), ("questions", questions, tokens)):
                picture = folder / f"{number}-{turn}-{asked}.png"
                drawn(number, 2 * turn + (asked > 1)).save(picture)
                letters = np.random.default_rng(turn).integers(ord("a"), ord("z") + 1, (asked, 16))
                texts = ["".join(map(chr, row)) for row in letters]
                yield (
                    f"{measure}, {number}, {turn}",
                    [
                        {
                            "prompt": [BEGIN, IMAGE, END, *(WORDS[letter] for letter in text)],
                            "text": text,
                            "picture": str(picture),
                            "features": number // MERGE**2,
                            "output": output,
                        }
                        for text in texts
                    ],
                )


def _alphabet() -> list[str]:
    """Return the characters that stand for bytes, in the order of their ids."""
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


WORDS = {letter: number for number, letter in enumerate(_alphabet())}


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer of bytes with the model's ids of pictures."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = WORDS | {f"<word {number}>": number for number in range(len(WORDS), IMAGE)}
    made = Tokenizer(models.BPE(vocab=words, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>")
    made.add_special_tokens([AddedToken(text, special=True) for text in special])
    PreTrainedTokenizerFast(tokenizer_object=made, eos_token="!").save_pretrained(folder)


def _sources(folder: Path, environments: dict[str, str]) -> Iterator[tuple[str, str, Path]]:
    """Yield each engine's name, interpreter and model in the form that it reads, which is made first."""
    yield "jpaged", sys.executable, folder / "model"
    for name, environment in environments.items():
        programs = Path(environment).absolute() / "bin"
        own = folder / name
        if name == "openvino":
            export = [programs / "optimum-cli", "export", "openvino", "--model", folder / "model"]
            subprocess.run([*export, "--task", "image-text-to-text", "--weight-format", "fp32", own], check=True)
        elif name == "llamacpp":
            subprocess.run([programs / "python", _SCRIPTS / "as_gguf_pair.py", folder / "model", own], check=True)
        yield name, str(programs / "python"), folder / "model" if name == "vllm" else own
