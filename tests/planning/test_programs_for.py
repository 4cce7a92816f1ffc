"""Programs that were compiled from shapes alone, in another process, are those that an engine asks for."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from greedy_reference import random_prompts
from tiny_chat_model import make_chat_model

from jpaged import LLM, SamplingParams
from jpaged.config import EngineConfig
from jpaged.engine.program_folder import configuration_digest
from jpaged.execution.compile.recent import recent_programs
from jpaged.execution.compile.store import MANIFEST
from jpaged.loading import convert_checkpoint
from jpaged.planning import find_device, plan
from jpaged.planning.child_process import Question

SETTINGS = {"dtype": "float32", "block_size": 8, "max_num_seqs": 2, "max_model_len": 64, "max_num_batched_tokens": 8}
SETTINGS |= {"kv_cache_memory_bytes": 1 << 20, "preemption_mode": "swap"}
PROMPTS = [{"prompt_token_ids": prompt} for prompt in random_prompts(lengths=(20, 9))]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def tokens(llm: LLM) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A model, and its programs for a CPU, the one device that can be described and is here too."""
    folder = tmp_path_factory.mktemp("made")
    make_chat_model(folder / "model")
    question = Question.of(EngineConfig(model=str(folder / "model"), **SETTINGS), find_device("cpu"))
    digest = configuration_digest(question.described.config)
    found = question.ask(Path(sys.executable), "programs", folder=str(folder / "programs"), model=digest)
    return str(folder / "model"), str(folder / "programs"), found


def test_an_engine_finds_them_and_gives_the_tokens_of_one_that_compiles(made):
    model, programs, found = made
    with LLM(model, **SETTINGS) as llm:
        expected = tokens(llm)
    recent_programs.clear()
    with LLM(model, compiled_programs=programs, **SETTINGS) as llm:
        assert llm.warmup(use_tqdm=False) == found["programs"]
        assert llm.control.engine.runner.worker.programs.num_found == found["programs"]
        assert tokens(llm) == expected


@pytest.mark.nightly
def test_programs_of_a_saved_checkpoint_are_for_the_form_that_it_holds(made, tmp_path):
    saved = str(tmp_path / "saved")
    convert_checkpoint(made[0], saved, quantization="int8")
    question = Question.of(EngineConfig(model=saved, **SETTINGS), find_device("cpu"))
    digest = configuration_digest(question.described.config)
    found = question.ask(Path(sys.executable), "programs", folder=str(tmp_path / "programs"), model=digest)
    recent_programs.clear()
    with LLM(saved, compiled_programs=str(tmp_path / "programs"), **SETTINGS) as llm:
        assert llm.warmup(use_tqdm=False) == found["programs"]
        assert llm.control.engine.runner.worker.programs.num_found == found["programs"]


@pytest.mark.nightly
def test_programs_for_adapters_are_those_of_an_engine_that_takes_some(made, tmp_path):
    """Which matrices they change follows from the shapes of the checkpoint's tensors."""
    settings = SETTINGS | {"enable_lora": True, "max_loras": 2, "max_lora_rank": 4}
    question = Question.of(EngineConfig(model=made[0], **settings), find_device("cpu"))
    digest = configuration_digest(question.described.config)
    found = question.ask(Path(sys.executable), "programs", folder=str(tmp_path / "programs"), model=digest)
    assert found["programs"] > made[2]["programs"]
    recent_programs.clear()
    with LLM(made[0], compiled_programs=str(tmp_path / "programs"), **settings) as llm:
        assert llm.warmup(use_tqdm=False) == found["programs"]
        assert llm.control.engine.runner.worker.programs.num_found == found["programs"]


def test_adapters_of_a_model_of_which_there_is_a_config_alone_are_refused():
    with pytest.raises(ValueError, match=r"the checkpoint's tensors; of qwen3-0\.6b there is a config alone"):
        plan("qwen3-0.6b", "cpu", context=64, enable_lora=True)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("platform", "tpu", "was compiled for platform='tpu', and this engine has 'cpu'"),
        ("device_kind", "TPU v5 lite", "was compiled for device_kind='TPU v5 lite', and this engine has 'cpu'"),
        ("devices", [["tensor", 8]], r"was compiled for devices=\[\['tensor', 8\]\], and this engine has"),
        ("versions", {"jax": "0.1"}, "was compiled for versions={'jax': '0.1'}"),
    ],
)
def test_programs_for_other_devices_or_versions_are_refused_by_what_differs(name, value, message, made, tmp_path):
    """Devices are told first: the pool of a larger one would not fit here, which says less."""
    manifest = json.loads((Path(made[1]) / MANIFEST).read_text())
    pool = 1 << 50 if name != "versions" else manifest["facts"]["pool_bytes"]
    (tmp_path / MANIFEST).write_text(
        json.dumps(manifest | {"facts": manifest["facts"] | {name: value, "pool_bytes": pool}})
    )
    settings = {key: setting for key, setting in SETTINGS.items() if key != "kv_cache_memory_bytes"}
    with pytest.raises(ValueError, match=message):
        LLM(made[0], compiled_programs=str(tmp_path), **settings)
