"""Compile the learning step of scripts/colab/5_grpo.py for one of Colab's devices, from shapes alone.

    training_program.py DEVICE

Run by `test_aot_notebooks.py` in an environment with the device's compiler; the notebook's own statements are run, with
shapes in the place of the engine's weights. Prints the program's sizes in bytes as JSON.
"""

from __future__ import annotations

import ast
import json
import os
import sys
from pathlib import Path
from typing import Any

from jpaged.planning.devices import Device, find_device

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "colab" / "5_grpo.py"
NAMES = {"SAMPLES", "PROMPTS", "RATE", "PROMPT_TOKENS", "ANSWER_TOKENS", "optimiser", "loss_of", "improve"}
"""What of the notebook the learning step is made of."""


def own_statements() -> ast.Module:
    """Return the notebook's imports and definitions of `NAMES`."""
    found = []
    for node in ast.parse(SCRIPT.read_text()).body:
        if isinstance(node, ast.Assign):
            (target,) = node.targets
            names = {name.id for name in ast.walk(target) if isinstance(name, ast.Name)}
        else:
            names = {node.name} if isinstance(node, ast.FunctionDef) else set()
        if names & NAMES or (isinstance(node, ast.Import) and node.names[0].name in ("jax", "jax.numpy", "optax")):
            found.append(node)
        if isinstance(node, ast.ImportFrom) and node.module in ("typing", "jpaged.training"):
            found.append(node)
    return ast.Module(found, [])


def main(device: Device) -> None:
    from jpaged.planning.target_mesh import environment, target_capability, target_mesh

    os.environ.update(environment(device, compiled=True))  # before a backend is asked for

    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec
    from transformers import LlamaConfig

    from jpaged.loading.build_context import build_context, layers_are_stacked
    from jpaged.loading.parameters.targets import abstract_model
    from jpaged.loading.parameters.weights import abstract_params
    from jpaged.training import TrainableModel
    from models.llama import Llama

    dtype = jnp.dtype("float32")
    mesh = target_mesh(device, compiled=True)
    kernels: Any = "tpu" if device.chip.kind == "tpu" else "gpu"
    stacked = layers_are_stacked(device.chip.kind, kernels)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    held = abstract_model(Llama, config, build_context(mesh, dtype, stacked=stacked, kernel_impl=kernels))
    params = abstract_params(held, mesh)
    everywhere = NamedSharding(mesh, PartitionSpec())
    notebook: dict[str, Any] = {"llm": TrainableModel.of_config(Llama, config, mesh, dtype, stacked=stacked)}
    exec(compile(own_statements(), SCRIPT.name, "exec"), notebook)

    def array(shape: tuple[int, ...], of: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, of, sharding=everywhere)

    rows, answer = notebook["PROMPTS"] * notebook["SAMPLES"], notebook["ANSWER_TOKENS"]
    width = notebook["PROMPT_TOKENS"] + answer
    state = jax.tree.map(lambda leaf: array(leaf.shape, leaf.dtype), jax.eval_shape(notebook["optimiser"].init, params))
    batch = (
        array((rows, width), jnp.int32),
        array((rows, width), bool),
        array((rows, answer), dtype),
        array((rows,), dtype),
    )
    with target_capability(device):
        lowered = notebook["improve"].lower(params, state, *batch)
    memory = lowered.compile().memory_analysis()
    print(
        json.dumps(
            {
                "weights": sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params)),
                "arguments": memory.argument_size_in_bytes,
                "results": memory.output_size_in_bytes,
                "temporaries": memory.temp_size_in_bytes,
                "limit": device.chip.limit,
            }
        )
    )


if __name__ == "__main__":
    main(find_device(sys.argv[1]))
