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

from jpaged.bench.prompts import Lengths
from jpaged.llm import LLM
from jpaged.loading import LoadedModel, model_class
from jpaged.loading.build_context import build_context
from jpaged.loading.parameters.targets import abstract_model
from jpaged.loading.parameters.weights import abstract_params
from jpaged.planning import DEVICES, plan
from jpaged.sampling_params import SamplingParams
from scripts.benchmarks.gpu_check.device_trace import busy_share

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
        expert_parallel=build.expert_parallel,
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


def decode(llm: LLM, load: Load, batch: int, bandwidth: float) -> dict[str, float]:
    """Measure a decode step of `batch` sequences: its seconds, those over what reading weights and KV once takes, and
    tokens/s."""
    short = 8
    base = [(load.decode_context, short)] * batch
    longer = [(load.decode_context, short + load.decode_steps)] * batch
    for lengths in (base, longer):
        generate(llm, lengths)  # whatever is slow the first time, compiling above all
    step = (min(generate(llm, longer) for _ in range(2)) - min(generate(llm, base) for _ in range(2))) / (
        load.decode_steps
    )
    tokens_read = batch * (load.decode_context + short + load.decode_steps / 2)
    ideal = (weight_bytes(llm) + tokens_read * token_bytes(llm)) / bandwidth
    return {"step_seconds": step, "step_over_ideal": step / ideal, "tokens_per_second": batch / step}


def prefill(llm: LLM, load: Load, flops: float) -> dict[str, float]:
    """Measure prompts of `decode_context` tokens, one after another: tokens/s, and the share of the products' peak that
    the products with weights make of the time."""
    lengths = [(load.decode_context, 1)] * 4
    generate(llm, lengths)
    speed = 4 * load.decode_context / min(generate(llm, lengths) for _ in range(3))
    return {"tokens_per_second": speed, "share_of_peak": 2 * parameters(llm) * speed / flops}


def throughput(llm: LLM, load: Load) -> dict[str, float]:
    """Measure output tokens/s of requests with ShareGPT's lengths; the first run, which compiles, does not count."""
    lengths = Lengths(num_prompts=4 * load.sequences, seed=0, **SHAREGPT).draw(llm.max_model_len)
    generate(llm, lengths)
    return {"output_tokens_per_second": sum(out for _, out in lengths) / generate(llm, lengths)}


def host_gap(llm: LLM, load: Load) -> dict[str, float]:
    """Measure the share of the time in which the device waits for the host, in decode steps."""
    lengths = [(load.decode_context, 8 + load.decode_steps)] * load.decode_batch
    generate(llm, lengths)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, create_perfetto_trace=True):
            generate(llm, lengths)
        return {"host_gap_share": 1 - busy_share(Path(folder))}


def planned(load: Load, kind: str) -> dict[str, float]:
    """Return the bytes that the GPU had in use at most, those that `jpaged plan` says of the same engine, and its bound
    of the tokens/s of full decodes.

    Args:
        kind: what JAX calls the GPU.

    Raises:
        ValueError: the table of devices has no such GPU.
    """
    names = [
        name
        for name, device in DEVICES.items()
        if device.count == 1 and device.chip.cuda and device.chip.cuda.name == kind
    ]
    if not names:
        raise ValueError(f"{kind!r} is not in the table of devices")
    more = settings(load)
    made = plan(
        "llama-3.1-8b", names[0], context=more.pop("max_model_len"), concurrency=more.pop("max_num_seqs"), **more
    )
    used = jax.local_devices()[0].memory_stats()["peak_bytes_in_use"]
    planned = made.weight_bytes + made.temporary_bytes + made.pool_bytes
    return {
        "peak_bytes": float(used),
        "planned_bytes": float(planned),
        "planned_over_peak": planned / used,
        "planned_tokens_per_second": made.decode_tokens_per_s,
    }


def generate(llm: LLM, lengths: list[tuple[int, int]]) -> float:
    """Answer random prompts of so many tokens with so many; returns the seconds it took."""
    random = np.random.default_rng(0)
    prompts = [{"prompt_token_ids": random.integers(0, llm.vocab_size, tokens).tolist()} for tokens, _ in lengths]
    params = [SamplingParams(temperature=0.0, max_tokens=out, ignore_eos=True) for _, out in lengths]
    start = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - start


def weight_bytes(llm: LLM) -> int:
    """Return the bytes of weights that a decode step reads: all but the embedding, of which it reads a few rows."""
    leaves = jax.tree_util.tree_flatten_with_path(llm.params)[0]
    return sum(leaf.nbytes for path, leaf in leaves if "embed" not in jax.tree_util.keystr(path))


def parameters(llm: LLM) -> int:
    """Return how many numbers multiply each token of a prompt: all but the embedding and the vocabulary's head."""
    leaves = jax.tree_util.tree_flatten_with_path(llm.params)[0]
    names = ((jax.tree_util.keystr(path), leaf.size) for path, leaf in leaves)
    return sum(size for name, size in names if "embed" not in name and "lm_head" not in name)


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
