"""What a notebook of scripts/colab compiles on Colab's accelerators, compiled for them by the compilers themselves."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from environments import python_of

from jpaged.planning import plan

pytestmark = pytest.mark.aot

FOLDER = Path(__file__).resolve().parents[2] / "scripts" / "colab"
DEVICES = {"T4": ("t4", "cuda", {"dtype": "float16"}), "TPU v5e-1": ("v5e-1", "tpu", {})}
"""Name of the device, its compiler, and what the notebooks choose for it."""


def engine_of(script: str) -> tuple[str, dict[str, int]]:
    """Return the model and the settings that a script gives to `LLM`, but for the dtype, which is the device's."""
    tree = ast.parse((FOLDER / script).read_text())
    numbers = {}
    for node in tree.body:
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.targets[0], ast.Name)
        ):
            numbers[node.targets[0].id] = node.value.value
    (call,) = [
        n for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id == "LLM"
    ]
    settings = {
        word.arg: eval(compile(ast.Expression(word.value), script, "eval"), {}, dict(numbers))
        for word in call.keywords
        if word.arg != "dtype"
    }
    return ast.literal_eval(call.args[0]), settings


@pytest.mark.parametrize("name", ["TPU v5e-1", pytest.param("T4", marks=pytest.mark.nightly)])
def test_the_first_notebooks_step_compiles_for_colabs_devices_and_copies_neither_weights_nor_pool(name):
    device, compiler, chosen = DEVICES[name]
    model, settings = engine_of("1_first_answers.py")
    assert {"max_model_len", "max_num_seqs", "max_num_batched_tokens", "kv_cache_memory_bytes"} == set(settings)
    made = plan(
        model,
        device,
        context=settings["max_model_len"],
        concurrency=settings["max_num_seqs"],
        compiler_env=python_of(compiler).parents[1],
        max_num_batched_tokens=settings["max_num_batched_tokens"],
        kv_cache_memory_bytes=settings["kv_cache_memory_bytes"],
        **chosen,
    )
    assert made.fits and made.compiler
    assert made.dtype == {"T4": "float16", "TPU v5e-1": "bfloat16"}[name]
    assert {program.name for program in made.programs} >= {"decode step", "mixed step", "sampler"}
    matrix = 2 * 1536 * 576 * 2  # the widest of a layer, in two bytes a weight: a T4 turns bfloat16 into float32 copies
    for program in made.programs:
        assert program.argument_bytes < 1.05 * (made.weight_bytes + made.pool_bytes)
        assert program.temporary_bytes < 5 * matrix < made.weight_bytes / 10
