"""What a notebook of scripts/colab compiles on Colab's accelerators, compiled for them by the compilers themselves."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
from environments import python_of, run_program
from transformers import Gemma3TextConfig

from jpaged.planning import Plan, plan

pytestmark = pytest.mark.aot

FOLDER = Path(__file__).resolve().parents[2] / "scripts" / "colab"
DEVICES = {"T4": ("t4", "cuda", {"dtype": "float16"}), "TPU v5e-1": ("v5e-1", "tpu", {})}
"""Name of the device, its compiler, and what the notebooks choose for it."""
JENGA = Gemma3TextConfig(
    vocab_size=1024,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=12,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    query_pre_attn_scalar=64,
    sliding_window=64,
    max_position_embeddings=1024,
)
"""Layers as those of the notebook on Jenga: five local ones to a global one."""


def engine_of(script: str) -> tuple[str, dict[str, int]]:
    """Return the model ("" = one that it makes) and the settings that a script gives to `LLM`, but for the dtype."""
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
    model = call.args[0]
    return model.value if isinstance(model, ast.Constant) else "", settings


def planned(model: str, device: str, settings: dict[str, int], **chosen: str) -> Plan:
    """Compile the largest programs of an engine for one of Colab's devices."""
    named = dict(settings)
    made = plan(
        model,
        DEVICES[device][0],
        context=named.pop("max_model_len"),
        concurrency=named.pop("max_num_seqs"),
        compiler_env=python_of(DEVICES[device][1]).parents[1],
        **named,
        **chosen,
    )
    assert made.fits and made.compiler
    assert {program.name for program in made.programs} >= {"decode step", "mixed step", "sampler"}
    return made


@pytest.mark.nightly
@pytest.mark.parametrize("name", DEVICES)
def test_the_first_notebooks_step_compiles_for_colabs_devices_and_copies_neither_weights_nor_pool(name):
    model, settings = engine_of("1_first_answers.py")
    limits = {"max_model_len", "max_num_seqs", "max_num_batched_tokens", "kv_cache_memory_bytes"}
    assert set(settings) == limits | {"block_size"} and settings["block_size"] == 16  # as the texts say
    made = planned(model, name, settings, **DEVICES[name][2])
    assert made.dtype == {"T4": "float16", "TPU v5e-1": "bfloat16"}[name]
    matrix = 2 * 1536 * 576 * 2  # the widest of a layer, in two bytes a weight: a T4 turns bfloat16 into float32 copies
    for program in made.programs:
        assert program.argument_bytes < 1.05 * (made.weight_bytes + made.pool_bytes)
        assert program.temporary_bytes < 5 * matrix < made.weight_bytes / 10


def test_the_notebook_on_sharing_has_the_engine_of_the_first_one():
    assert engine_of("2_sharing.py") == engine_of("1_first_answers.py")


def served_by(script: str) -> tuple[str, dict[str, int]]:
    """Return the model and the settings that a script gives to the command `jpaged serve`."""
    lists = {
        node.targets[0].id: [word.value for word in node.value.elts if isinstance(word, ast.Constant)]
        for node in ast.parse((FOLDER / script).read_text()).body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and isinstance(node.value, ast.List)
    }
    command, sizes = lists["command"], lists["sizes"]
    names = [flag.removeprefix("--").replace("-", "_") for flag in sizes[::2]]
    return command[command.index("serve") + 1], dict(zip(names, map(int, sizes[1::2]), strict=True))


@pytest.mark.nightly
@pytest.mark.parametrize("name", DEVICES)
def test_the_server_of_the_notebook_on_serving_compiles_for_colabs_devices(name):
    model, settings = served_by("4_serving.py")
    assert set(settings) == {"max_model_len", "max_num_seqs", "max_num_batched_tokens"}
    made = planned(model, name, settings, **DEVICES[name][2])
    assert made.dtype == {"T4": "float16", "TPU v5e-1": "bfloat16"}[name]


@pytest.mark.nightly
@pytest.mark.parametrize("name", DEVICES)
def test_the_notebook_on_grpo_has_steps_in_float32_that_compile_for_colabs_devices(name):
    model, settings = engine_of("5_grpo.py")
    assert planned(model, name, settings, dtype="float32").dtype == "float32"


@pytest.mark.nightly
@pytest.mark.parametrize("name", DEVICES)
def test_the_learning_step_of_the_notebook_on_grpo_fits_colabs_devices_beside_the_engine(name):
    device, compiler, _ = DEVICES[name]
    sizes = json.loads(run_program(compiler, "training_program.py", device))
    _, settings = engine_of("5_grpo.py")
    assert sizes["weights"] < sizes["arguments"] < 3.05 * sizes["weights"], "the weights, and Adam's two means of them"
    assert sizes["temporaries"] < 3 * sizes["weights"]
    taken = sizes["arguments"] + sizes["results"] + sizes["temporaries"] + settings["kv_cache_memory_bytes"]
    assert taken < 0.5 * sizes["limit"]


@pytest.mark.nightly
@pytest.mark.parametrize("name", DEVICES)
def test_the_layers_of_the_notebook_on_jenga_compile_for_colabs_devices(name, tmp_path):
    JENGA.to_json_file(tmp_path / "config.json")
    _, settings = engine_of("3_jenga.py")
    made = planned(str(tmp_path / "config.json"), name, settings, **DEVICES[name][2])
    assert len(made.groups) == 2
