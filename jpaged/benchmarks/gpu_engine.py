"""Measures the whole engine on a GPU: a Llama-3.1-8B of random weights, against the memory bandwidth."""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jpaged.benchmarks.device_trace import busy_share
from jpaged.benchmarks.prompts import Lengths
from jpaged.llm import LLM
from jpaged.loading import LoadedModel, model_class
from jpaged.loading.build_context import build_context
from jpaged.loading.parameters.targets import abstract_model
from jpaged.loading.parameters.weights import abstract_params
from jpaged.sampling_params import SamplingParams

LLAMA_8B: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
SHAREGPT: dict[str, Any] = {"mean_input": 161, "mean_output": 338, "sigma": 0.9}
"""Mean lengths of ShareGPT's conversations as the PagedAttention paper gives them (SOSP'23, figure 11)."""


@dataclass(frozen=True)
class Load:
    """Says what the engine is asked for: batch sizes, prompt lengths and numbers of steps.

    Attributes:
        decode_batch, decode_context: sequences of the timed decode steps and their prompts' tokens.
        decode_steps: steps that are timed.
        sequences: max_num_seqs, and a quarter of the requests of the throughput run.
    """

    decode_batch: int = 64
    decode_context: int = 1024
    decode_steps: int = 128
    sequences: int = 256
    max_model_len: int = 2048


def random_model(config: Any, mesh: jax.sharding.Mesh, dtype: Any) -> LoadedModel:
    """Return a model of small random weights, made on the devices; no tokenizer, no end of sequence."""
    family = model_class(config.model_type)
    build = build_context(mesh, dtype)
    model = abstract_model(family, config, build)
    shapes, tree = jax.tree.flatten(abstract_params(model, mesh))
    drawn = [_draw(i, shape) for i, shape in enumerate(shapes)]
    return LoadedModel(
        graphdef=nnx.split(model)[0],
        params=jax.tree.unflatten(tree, drawn),
        config=config,
        tokenizer=None,
        eos_token_ids=(),
        name="random weights",
        model=model,
        dtype=np.dtype(dtype),
        mesh=mesh,
        stacked=build.stacked,
        tensor_shapes={},
    )


def _draw(index: int, shape: jax.ShapeDtypeStruct) -> jax.Array:
    def draw() -> jax.Array:
        return 0.02 * jax.random.normal(jax.random.key(index), shape.shape, shape.dtype)

    return jax.jit(draw, out_shardings=shape.sharding)()


def random_llm(config: Any, dtype: Any = jnp.bfloat16, **settings: Any) -> LLM:
    """Build an `LLM` of a configuration instead of a checkpoint."""
    with mock.patch("jpaged.engine.builder.load_model", lambda _, *, mesh, **__: random_model(config, mesh, dtype)):
        return LLM("random weights", **settings)


def measure(llm: LLM, load: Load, bandwidth: float) -> dict[str, float]:
    """Measure decode step time over what reading weights and KV takes, output tokens/s, and the share of host gaps."""
    vocab = llm.vocab_size
    random = np.random.default_rng(0)

    def generate(lengths: list[tuple[int, int]]) -> float:
        prompts = [{"prompt_token_ids": random.integers(0, vocab, tokens).tolist()} for tokens, _ in lengths]
        params = [SamplingParams(temperature=0.0, max_tokens=out, ignore_eos=True) for _, out in lengths]
        start = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - start

    short = 8
    base = [(load.decode_context, short)] * load.decode_batch
    longer = [(load.decode_context, short + load.decode_steps)] * load.decode_batch
    generate(base)  # whatever is slow the first time
    step = (generate(longer) - min(generate(base), generate(base))) / load.decode_steps
    tokens_read = load.decode_batch * (load.decode_context + short + load.decode_steps / 2)
    ideal = (weight_bytes(llm) + tokens_read * token_bytes(llm)) / bandwidth

    lengths = Lengths(num_prompts=4 * load.sequences, seed=0, **SHAREGPT).draw(llm.max_model_len)
    seconds = generate(lengths)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, create_perfetto_trace=True):
            generate(longer)
        busy = busy_share(Path(folder))
    return {
        "decode_step_seconds": step,
        "decode_step_over_ideal": step / ideal,
        "output_tokens_per_second": sum(out for _, out in lengths) / seconds,
        "host_gap_share": 1 - busy,
    }


def weight_bytes(llm: LLM) -> int:
    """Return the bytes of weights that a decode step reads: all but the embedding, of which it reads a few rows."""
    leaves = jax.tree_util.tree_flatten_with_path(llm.params)[0]
    return sum(leaf.nbytes for path, leaf in leaves if "embed" not in jax.tree_util.keystr(path))


def token_bytes(llm: LLM) -> int:
    """Return how many bytes the KV of one token takes."""
    config = llm.model_config
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * llm.dtype.itemsize


def llama_8b() -> Any:
    """Return the configuration of Llama-3.1-8B."""
    from transformers import LlamaConfig

    return LlamaConfig(**LLAMA_8B)


def settings(load: Load) -> dict[str, Any]:
    """Return an engine's settings for a load."""
    return {"max_num_seqs": load.sequences, "max_model_len": load.max_model_len, "enable_prefix_caching": False}
