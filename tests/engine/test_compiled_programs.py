"""An engine made from compiled programs traces and compiles nothing, and refuses programs that are not its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from greedy_reference import random_prompts
from tiny_chat_model import make_chat_model

from jpaged import LLM, MTP, DraftModel, SamplingParams
from jpaged.execution.compile.recent import recent_programs
from jpaged.execution.compile.store import MANIFEST
from jpaged.loading import convert_checkpoint

pytestmark = pytest.mark.each_shape
SETTINGS = {"dtype": "float32", "block_size": 8, "max_num_seqs": 2, "max_model_len": 64, "max_num_batched_tokens": 8}
PROMPTS = [{"prompt_token_ids": prompt} for prompt in random_prompts(lengths=(20, 9))]
PARAMS = SamplingParams(temperature=0.9, seed=3, max_tokens=8, ignore_eos=True)
SCRIPT = """
import json, sys
from jpaged import LLM, SamplingParams
model, folder, settings, prompts = json.loads(sys.argv[1])
llm = LLM(model, compiled_programs=folder, **settings)
number = llm.warmup(use_tqdm=False)
params = SamplingParams(temperature=0.9, seed=3, max_tokens=8, ignore_eos=True)
outputs = llm.generate(prompts, params, use_tqdm=False)
store = llm.control.engine.runner.worker.programs
print(json.dumps([number, store.num_found, [list(output.outputs[0].token_ids) for output in outputs]]))
"""
COUNT = """
import sys
from jax import monitoring
compiled = []
def note(name, seconds, fun_name="", **_):
    if "backend_compile" in name:
        compiled.append(fun_name)
monitoring.register_event_duration_secs_listener(note)
""" + SCRIPT.replace("number = llm.warmup(use_tqdm=False)\n", "").replace("[number, ", "[compiled, ").replace(
    "num_found, ", "num_found, 'numba' in sys.modules, "
)


def tokens(llm):
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compiled")
    model = folder / "model"
    make_chat_model(model)
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    with LLM(str(model), **SETTINGS) as llm:
        expected = tokens(llm)
    programs = folder / "programs"
    number, size = LLM.compile_programs(model, programs, use_tqdm=False, **SETTINGS)
    assert number > 3 and size > 10_000
    return SimpleNamespace(model=str(model), programs=str(programs), expected=expected, number=number)


def test_an_engine_of_the_programs_finds_all_of_them_and_gives_the_same_tokens(made):
    recent_programs.clear()
    with LLM(made.model, compiled_programs=made.programs, **SETTINGS) as llm:
        assert llm.warmup(use_tqdm=False) == made.number
        assert llm.control.engine.runner.worker.programs.num_found == made.number
        assert tokens(llm) == made.expected and llm.num_recompiles == 0


def test_another_process_traces_nothing(made):
    prompts = [prompt["prompt_token_ids"] for prompt in PROMPTS]
    asked = json.dumps([made.model, made.programs, SETTINGS, [{"prompt_token_ids": ids} for ids in prompts]])
    done = subprocess.run([sys.executable, "-c", SCRIPT, asked], capture_output=True, text=True, check=True)
    number, found, given = json.loads(done.stdout.splitlines()[-1])
    assert (number, given) == (made.number, made.expected)
    assert found == made.number, "a CPU's loops are registered without tracing"


def test_requests_without_a_warm_up_compile_nothing_on_a_machine_whose_caches_are_empty(made, tmp_path):
    """A first step's pool is no result of a program, and loops of a CPU come from the folder."""
    prompts = [prompt["prompt_token_ids"] for prompt in PROMPTS]
    settings = {**SETTINGS, "background_compilation": False}
    asked = json.dumps([made.model, made.programs, settings, [{"prompt_token_ids": ids} for ids in prompts]])
    empty = {name: str(tmp_path / name) for name in ("NUMBA_CACHE_DIR", "JAX_COMPILATION_CACHE_DIR")}
    done = subprocess.run([sys.executable, "-c", COUNT, asked], capture_output=True, text=True, env=os.environ | empty)
    assert done.returncode == 0, done.stderr
    compiled, found, numba, given = json.loads(done.stdout.splitlines()[-1])
    assert given == made.expected and found > 1
    assert not {"jit(steps)", "jit(sample)"} & set(compiled), "no shape is compiled"
    assert not numba and not list(tmp_path.rglob("*.loops")), "nor a loop"


@pytest.mark.nightly
def test_copies_to_the_host_are_kept_where_requests_are_swapped(made, tmp_path):
    settings = SETTINGS | {"preemption_mode": "swap"}
    number, _ = LLM.compile_programs(made.model, tmp_path / "programs", use_tqdm=False, **settings)
    recent_programs.clear()
    with LLM(made.model, compiled_programs=str(tmp_path / "programs"), **settings) as llm:
        assert llm.warmup(use_tqdm=False) == number == llm.control.engine.runner.worker.programs.num_found > made.number


@pytest.mark.parametrize(
    ("fact", "value", "message"),
    [
        ("jpaged", "0.1.0", "jpaged='0.1.0', and this engine has "),
        ("versions.jax", "0.1.0", r"versions\.jax='0.1.0', and this engine has "),
        ("versions.numba", None, r"versions\.numba=None, and this engine has "),
        ("device_kind", "TPU v9", "device_kind='TPU v9', and this engine has "),
        ("processor", "another", "processor='another', and this engine has "),
        ("XLA_FLAGS", "--xla_none", "XLA_FLAGS='--xla_none', and this engine has "),
        ("code", "other", "code='other', and this engine has "),
        ("model", "other", "model='other', and this engine has "),
        ("settings.dtype", "bfloat16", r"settings\.dtype='bfloat16', and this engine has 'float32'"),
        ("settings.max_model_len", 32, r"settings\.max_model_len=32, and this engine has 64"),
        ("settings.block_size", 16, r"settings\.block_size=16, and this engine has 8"),
        ("settings.gone", 1, r"settings\.gone=1, and this engine has None"),
    ],
)
def test_what_differs_is_named_before_weights_are_read(fact, value, message, made, tmp_path, monkeypatch):
    folder = shutil.copytree(made.programs, tmp_path / "programs")
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["facts"][fact] = value
    (folder / MANIFEST).write_text(json.dumps(manifest))
    monkeypatch.setattr("jpaged.loading.load._load", lambda *_, **__: pytest.fail("read weights"))
    with pytest.raises(ValueError, match=f"was compiled for {message}"):
        LLM(made.model, compiled_programs=str(folder), **SETTINGS)


def test_the_pool_is_of_the_size_that_the_programs_are_for(made):
    small = {**SETTINGS, "compiled_programs": made.programs}
    facts = json.loads((Path(made.programs) / MANIFEST).read_text())["facts"]
    with LLM(made.model, **small) as llm:
        assert llm.control.engine.runner.spec.device_bytes == facts["pool_bytes"]
    with pytest.raises(ValueError, match="was compiled for pool_bytes="):
        LLM(made.model, kv_cache_memory_bytes=facts["pool_bytes"] // 2, **small)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"max_num_seqs": 4}, "was compiled for settings.max_num_seqs=2, and this engine has 4"),
        ({"deterministic": True}, "was compiled for settings.deterministic=False"),
        ({"quantization": "int8"}, "was compiled for settings.quantization=None"),
        ({"speculative": DraftModel("elsewhere", tokens=1)}, "programs of a draft model are not kept"),
        ({"speculative": MTP()}, "programs of a head that drafts are not kept"),
    ],
)
def test_other_settings_are_refused_with_what_differs(other, message, made):
    with pytest.raises(ValueError, match=message):
        LLM(made.model, compiled_programs=made.programs, **{**SETTINGS, **other})


def test_what_changes_no_program_may_differ(made):
    free = {"seed": 5, "max_logprobs": 3, "watermark": 0.2, "enable_prefix_caching": False}
    with LLM(made.model, compiled_programs=made.programs, **SETTINGS, **free) as llm:
        assert tokens(llm) == made.expected


def test_another_model_of_the_same_shapes_is_refused(made, tmp_path):
    make_chat_model(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    with pytest.raises(ValueError, match="was compiled for model="):
        LLM(str(tmp_path), compiled_programs=made.programs, **SETTINGS)


def test_a_checkpoint_of_the_same_model_in_another_form_is_refused(made, tmp_path, monkeypatch):
    facts = json.loads((Path(made.programs) / MANIFEST).read_text())["facts"]
    monkeypatch.setattr(
        "jpaged.engine.program_folder.num_compact", lambda params: facts["weights.exact_matrices"]
    )  # elsewhere none is, and this tells no forms apart
    convert_checkpoint(made.model, tmp_path / "saved", quantization="int8")
    with pytest.raises(ValueError, match=r"was compiled for weights\.held=.* and this engine has .*int8"):
        LLM(str(tmp_path / "saved"), compiled_programs=made.programs, **SETTINGS)


def test_an_engine_that_compiles_nothing_ahead_has_nothing_to_write(made, tmp_path):
    with pytest.raises(ValueError, match="enforce_eager=True"):
        LLM.compile_programs(made.model, tmp_path / "none", enforce_eager=True, **SETTINGS)
    assert not (tmp_path / "none").exists()
