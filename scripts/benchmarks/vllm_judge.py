"""Lets vLLM on this CPU answer from quantised folders, and compares it with jpaged and with PyTorch.

Folders come from `jpaged quantize` and from `format_folders`, which shares nothing with the package. All of them hold
the same model, whose values each format rounds.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from jpaged import LLM, SamplingParams
from jpaged.loading.open_checkpoint import open_model
from jpaged.loading.quantised_folder import quantise_folder
from jpaged.loading.tokenizer import has_tokenizer, load_tokenizer
from scripts.benchmarks.format_folders import BY_COMMAND, COMPRESSED, DEFINED, write_defined
from scripts.benchmarks.peers import peer_variables
from scripts.cases import Row

ANSWERS = Path(__file__).parent / "peer_engines" / "vllm_answers.py"
VALUES = Path(__file__).parent / "peer_engines" / "compressed_values.py"
PROMPTS = (
    "The capital of France is",
    "Write a haiku about the sea.",
    "def fibonacci(n):",
    "Once upon a time there was a small village",
    "Q: A farmer has 17 sheep and buys 25 more. How many sheep has the farmer?\nA:",
    "In 1969, three astronauts flew to the Moon.",
    "The three primary colours are",
    "Water boils at",
    "To make bread you need flour,",
    "import numpy as np\n",
)
PLAIN = "not quantised"
FORMS = (PLAIN, *BY_COMMAND, *COMPRESSED)


class Answer(NamedTuple):
    """An engine's greedy tokens after a prompt, and their log-probabilities."""

    tokens: list[int]
    logprobs: list[float]


def vllm_judge(
    model: Path,
    env: Path,
    forms: list[str] = list(FORMS),  # noqa: B006 (never changed)
    tokens: int = 32,
    dtype: str = "bfloat16",
) -> Iterator[Row]:
    """Greedy answers of vLLM and jpaged from quantised folders of one model, and how PyTorch scores both.

    --model is a plain Hugging Face folder, --env the environment that peer_engines/environment.sh vllm makes, --dtype
    what vLLM computes in; jpaged computes in float32. Ten prompts are answered with --tokens tokens each. "greedy"
    counts tokens that PyTorch would choose in float32 with the values of the folder; "log-prob" is the mean, and the
    greatest, distance to its log-probabilities; "rounding" the mean distance that the format itself makes. "values" is
    the greatest distance of the values that compressed-tensors' own package reads.

    Raises:
        ValueError: an unknown form, or no environment there.
    """
    if unknown := set(forms) - set(FORMS):
        raise ValueError(f"forms={sorted(unknown)} are none of {', '.join(FORMS)}")
    if not (env / "bin" / "python").exists():
        raise ValueError(f"env={str(env)!r} is no environment: there is no bin/python")
    prompts = _prompts(model)
    plain = judge_of(model, {})
    for form in forms:
        with tempfile.TemporaryDirectory() as folder:
            source, values = _written(form, model, Path(folder) / "model")
            judge = judge_of(model, values)
            answered: dict[str, list[Answer] | str] = {"jpaged": _of_jpaged(source, prompts, tokens)}
            answered["vllm"] = _of_vllm(source, prompts, tokens, env, dtype)
            for engine, answers in answered.items():
                yield {"form": form, "engine": engine} | scored(answers, answered["jpaged"], prompts, judge, plain)
            if form in COMPRESSED or form.startswith("compressed-tensors"):
                yield {"form": form, "engine": "compressed-tensors", "values": _distance(source, values, env)}


def scored(
    answers: list[Answer] | str,
    others: list[Answer] | str,
    prompts: list[list[int]],
    judge: torch.nn.Module,
    plain: torch.nn.Module,
) -> Row:
    """Return an engine's figures.

    Args:
        answers: the engine's, or why it refused the folder.
        others: answers that its own are counted against.
        judge, plain: PyTorch's models with the folder's values, and with those that were rounded.
    """
    names = ("answers as jpaged's", "greedy", "of", "log-prob", "at most", "rounding", "values", "refused")
    row: Row = dict.fromkeys(names)
    if isinstance(answers, str):
        return row | {"refused": answers}
    greedy, away, rounding = [], [], []
    for prompt, answer in zip(prompts, answers, strict=True):
        logprobs = logprobs_of(judge, prompt, answer.tokens)
        of_tokens = logprobs.gather(-1, torch.tensor(answer.tokens)[:, None])[:, 0]
        greedy += (logprobs.argmax(-1) == torch.tensor(answer.tokens)).tolist()
        away += (torch.tensor(answer.logprobs) - of_tokens).abs().tolist()
        unrounded = logprobs_of(plain, prompt, answer.tokens).gather(-1, torch.tensor(answer.tokens)[:, None])[:, 0]
        rounding += (unrounded - of_tokens).abs().tolist()
    same = sum(one.tokens == other.tokens for one, other in zip(answers, others, strict=True))  # type: ignore[union-attr]
    found = (same, sum(greedy), len(greedy), float(np.mean(away)), max(away), float(np.mean(rounding)))
    return row | dict(zip(names, found, strict=False))


@torch.inference_mode()
def logprobs_of(judge: torch.nn.Module, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """Return log-probabilities [tokens, vocab] where each of the tokens was drawn."""
    logits = judge(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    found: torch.Tensor = logits.float().log_softmax(-1)
    return found


def _prompts(model: Path) -> list[list[int]]:
    """Return the prompts as token ids; random ones for a model without a tokenizer."""
    opened = open_model(model)
    if has_tokenizer(opened.source):
        tokenizer = load_tokenizer(opened.source, opened.gguf)
        return [list(tokenizer.encode(text)) for text in PROMPTS]
    random = np.random.default_rng(0)
    return [random.integers(3, opened.config.get_text_config().vocab_size, 9).tolist() for _ in PROMPTS]


def judge_of(model: Path, values: Mapping[str, torch.Tensor]) -> torch.nn.Module:
    """Return PyTorch's model in float32 with some tensors replaced."""
    judge = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    _, unexpected = judge.load_state_dict(dict(values), strict=False)
    assert not unexpected, unexpected
    return judge


def _written(form: str, model: Path, folder: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """Write a form; return its folder and the values of the tensors in it that are not the model's."""
    if form == PLAIN:
        return model, {}
    if form in BY_COMMAND:
        quantise_folder(model, folder, **BY_COMMAND[form])
        reader = open_model(folder).reader
        names = [name for name in reader.names() if name.endswith("_proj.weight")]
        return folder, {name: torch.tensor(np.asarray(reader.read(name), np.float32)) for name in names}
    return folder, write_defined(DEFINED[form], model, folder)


def _distance(folder: Path, values: Mapping[str, torch.Tensor], env: Path) -> float:
    """Return how far the values that compressed-tensors' package reads from a folder are from others, at most."""
    with tempfile.TemporaryDirectory() as place:
        out = Path(place) / "values.safetensors"
        command = [str(env / "bin" / "python"), str(VALUES), str(folder), str(out)]
        subprocess.run(command, env=os.environ | {"PYTHONPATH": ""}, check=True, stdout=subprocess.DEVNULL)
        found = load_file(out)
    assert found.keys() == values.keys()
    return max(float((found[name] - values[name]).abs().max()) for name in found)


def _of_jpaged(model: Path, prompts: list[list[int]], tokens: int) -> list[Answer]:
    longest = max(map(len, prompts)) + tokens
    params = SamplingParams(temperature=0, max_tokens=tokens, min_tokens=tokens, ignore_eos=True, logprobs=0)
    with LLM(str(model), dtype="float32", max_model_len=longest, max_num_seqs=len(prompts)) as llm:
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    answers = []
    for (one,) in (output.outputs for output in outputs):
        ids = list(one.token_ids)
        answers.append(Answer(ids, [found[token].logprob for token, found in zip(ids, one.logprobs, strict=True)]))
    return answers


def _of_vllm(model: Path, prompts: list[list[int]], tokens: int, env: Path, dtype: str) -> list[Answer] | str:
    """Return vLLM's answers, or the message of its exception."""
    with tempfile.TemporaryDirectory() as folder:
        work, out = Path(folder) / "work.json", Path(folder) / "out.json"
        work.write_text(json.dumps({"prompts": prompts, "tokens": tokens}))
        command = [str(env / "bin" / "python"), str(ANSWERS), str(model), dtype, str(work), str(out)]
        variables = {"PYTHONPATH": ""} | peer_variables("vllm", env)
        done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True)
        if done.returncode:
            return message_of(done.stderr) or f"exit {done.returncode}"
        return [Answer(answer["tokens"], answer["logprobs"]) for answer in json.loads(out.read_text())]


def message_of(stderr: str) -> str:
    """Return the message of the last exception in what a process wrote, in one line; "" if there is none."""
    lines = [re.sub(r"^(\[rank\d+\]|\(.*?pid=\d+\)):? ?", "", line) for line in stderr.splitlines()]
    starts = [number for number, line in enumerate(lines) if re.match(r"\w*(Error|Exception)\b: ", line)]
    if not starts:
        return ""
    rest = itertools.takewhile(lambda line: line.strip() and "Warning" not in line, lines[starts[-1] :])
    return " ".join(" ".join(rest).split())
