"""Measures how costs grow with the number of sequences, with their length and with the size of the model."""

from __future__ import annotations

import json
import resource
import tempfile
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

import numpy as np

VOCABULARY = 32768
HEAD_DIM = 64
SHAPES = {"0.1B": (768, 12), "0.2B": (1024, 16), "0.5B": (1536, 16), "1B": (2048, 20), "2B": (2560, 24)}
"""Width and number of layers of models, by their size."""
SEQUENCES = (1, 4, 16, 64, 256, 1024)
CONTEXTS = (1024, 4096, 16384, 32768)
PROMPT, OUTPUT = 16, 32
"""Tokens of a sequence where its length is not what grows."""
ROUNDS = 3
"""Number of times that tokens are decoded; the fastest counts."""


@dataclass(frozen=True)
class Work:
    """Describes the work that one process measures.

    Attributes:
        folder: of the model.
        sequences: how many run at once.
        prompt: tokens of each prompt; `OUTPUT` more are generated.
    """

    folder: str
    dtype: str
    quantization: str | None
    sequences: int
    prompt: int


def growth(
    axes: list[Literal["sequences", "context", "parameters"]] = ["sequences", "context", "parameters"],  # noqa: B006
    dtype: Literal["float32", "bfloat16"] = "bfloat16",
    quantization: str | None = None,
    most_sequences: int = 1024,
    most_context: int = 32768,
    largest: str = "2B",
) -> Iterator[dict[str, Any]]:
    """Tokens/s, the host's time a step, memory and programs as work grows; Llamas of random weights, greedy.

    "sequences" runs 1 to 1,024 sequences of a model of 0.1B at once, "context" one sequence of it with a prompt of
    1,024 to 32,768 tokens, and "parameters" 8 sequences of models of 0.1B to 2B. Each row is measured in a process of
    its own, the second time that it does the work; tokens are decoded with their prompts in the cache.

    "read" and "decoded" are tokens/s of all sequences, prompts and outputs; "step" and "host" milliseconds of a step
    with a token of each sequence, by the clock and in processor time of the thread that schedules, draws and
    dispatches. "weights" and "peak" are GiB, the latter of resident memory with the pool; "programs" is how many were
    compiled.
    """
    if largest not in SHAPES:
        raise ValueError(f"largest={largest!r} is none of {', '.join(SHAPES)}")
    sizes = list(SHAPES)[: list(SHAPES).index(largest) + 1]
    works: dict[str, list[tuple[str, str, int, int]]] = {
        "sequences": [(f"{number:,}", "0.1B", number, PROMPT) for number in SEQUENCES if number <= most_sequences],
        "context": [(f"{tokens:,}", "0.1B", 1, tokens) for tokens in CONTEXTS if tokens <= most_context],
        "parameters": [(size, size, 8, PROMPT) for size in sizes],
    }
    with tempfile.TemporaryDirectory() as root:
        for axis in axes:
            for value, size, sequences, prompt in works[axis]:
                folder = Path(root) / size
                if not folder.exists():
                    write_llama(folder, *SHAPES[size])
                with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
                    work = Work(str(folder), dtype, quantization, sequences, prompt)
                    yield {"grows": axis, "to": value, **process.submit(measure, work).result()}


def write_llama(folder: Path, width: int, layers: int) -> None:
    """Write a checkpoint in bfloat16 whose numbers repeat after a million."""
    from ml_dtypes import bfloat16
    from safetensors.numpy import save_file

    folder.mkdir()
    inner, key_width = width * 8 // 3 // 64 * 64, width // 4
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": width // HEAD_DIM,
        "num_key_value_heads": key_width // HEAD_DIM,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": CONTEXTS[-1] + 2 * OUTPUT,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    drawn = (np.random.default_rng(0).standard_normal(1_000_003, np.float32) * 0.02).astype(bfloat16)
    shapes = {
        "self_attn.q_proj": (width, width),
        "self_attn.k_proj": (key_width, width),
        "self_attn.v_proj": (key_width, width),
        "self_attn.o_proj": (width, width),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
    }
    tensors = {"model.embed_tokens.weight": np.resize(drawn, (VOCABULARY, width))}
    ones = np.ones(width, bfloat16)
    tensors["model.norm.weight"] = ones
    for layer in range(layers):
        name = f"model.layers.{layer}"
        tensors |= {f"{name}.{part}.weight": np.resize(drawn, shape) for part, shape in shapes.items()}
        tensors |= {f"{name}.{part}_layernorm.weight": ones for part in ("input", "post_attention")}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def measure(work: Work) -> dict[str, Any]:
    """Do the work twice in this process and return the figures of the second time."""
    from jpaged import LLM, SamplingParams
    from jpaged.bench.throughput import matrix_bytes

    warnings.filterwarnings("ignore", ".*has no tokenizer")
    length = work.prompt + OUTPUT
    llm = LLM(
        work.folder,
        dtype=work.dtype,
        quantization=work.quantization,
        max_num_seqs=work.sequences,
        max_model_len=length + 16,
        enable_prefix_caching=True,
    )
    drawn = np.random.default_rng(1)

    def prompts() -> list[dict[str, list[int]]]:
        tokens = drawn.integers(3, VOCABULARY, (work.sequences, work.prompt))
        return [{"prompt_token_ids": row} for row in tokens.tolist()]

    def run(of: list[dict[str, list[int]]], outputs: int) -> np.ndarray:
        """Return seconds by the clock, of the processor in this thread, and the number of steps."""
        params = SamplingParams(temperature=0.0, max_tokens=outputs, ignore_eos=True)
        before = np.array([time.perf_counter(), time.thread_time(), llm.stats().num_steps])
        llm.generate(of, params, use_tqdm=False)
        return np.array([time.perf_counter(), time.thread_time(), llm.stats().num_steps]) - before

    run(prompts(), OUTPUT)  # compiles
    measured = prompts()
    read, *_ = run(measured, 1)
    run(measured, OUTPUT)  # compiles the steps that find their prompts in the cache
    rounds = [run(measured, OUTPUT) - run(measured, 1) for _ in range(ROUNDS)]
    decoding, host, steps = min(rounds, key=lambda found: found[0])
    return {
        "read": work.sequences * work.prompt / read,
        "decoded": work.sequences * (OUTPUT - 1) / decoding,
        "step": decoding / steps * 1e3,
        "host": host / steps * 1e3,
        "weights": matrix_bytes(llm) / 2**30,
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "programs": llm.stats().num_compiled,
    }
