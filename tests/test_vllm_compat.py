"""Settings under vLLM's names: taken, refused with what to use here, or unknown."""

from __future__ import annotations

import pytest

from jpaged import LLM, SamplingParams
from jpaged.config import EngineConfig
from jpaged.vllm_compat import engine_settings
from jpaged.vllm_refusals import missing_attribute


def test_settings_of_our_own_pass_through():
    settings = {"max_model_len": 128, "dtype": "float32", "swap_space_bytes": None}
    assert engine_settings(settings, EngineConfig) == settings


def test_what_means_the_same_is_taken_under_vllms_name():
    assert engine_settings({"gpu_memory_utilization": 0.5}, EngineConfig) == {"memory_utilization": 0.5}
    taken = {"tokenizer": "t", "revision": "main", "download_dir": "d", "dtype": "half", "enforce_eager": True}
    assert engine_settings(taken, EngineConfig) == taken


@pytest.mark.parametrize("value", [0, 1.5, "half", True])
def test_a_bad_value_is_told_under_the_name_that_was_given(value):
    with pytest.raises(ValueError, match=f"^gpu_memory_utilization={value!r} "):
        engine_settings({"gpu_memory_utilization": value}, EngineConfig)


@pytest.mark.parametrize("order", [1, -1])
def test_two_names_of_one_setting_exclude_each_other(order):
    settings = dict([("gpu_memory_utilization", 0.5), ("memory_utilization", 0.5)][::order])
    with pytest.raises(ValueError, match="gpu_memory_utilization and memory_utilization are one setting"):
        engine_settings(settings, EngineConfig)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("enable_chunked_prefill", True),
        ("trust_remote_code", False),
        ("pipeline_parallel_size", 1),
        ("task", "generate"),
        ("tokenizer_mode", "auto"),
        ("speculative_config", None),
        ("max_num_seqs", None),
        ("preemption_mode", None),
        ("enable_eplb", False),
        ("async_scheduling", True),
        ("nnodes", 1),
    ],
)
def test_a_value_that_asks_for_what_is_done_anyway_is_taken(name, value):
    assert engine_settings({name: value}, EngineConfig) == {}


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("enable_chunked_prefill", False, "must be True: long prompts always run in chunks"),
        ("trust_remote_code", True, "must be False: no code of a model's repository is run"),
        ("trust_remote_code", 0, "must be False"),
        ("lora_dtype", "bfloat16", "the model's dtype"),
        ("async_scheduling", False, "before it reads the results"),
        ("hf_token", False, "HF_TOKEN in the environment"),
        ("enable_eplb", True, "enable_expert_parallel"),
        ("num_gpu_blocks_override", 100, "kv_cache_memory_bytes"),
        ("load_format", "pt", "the format is known from the files"),
        ("hf_overrides", {}, "config.json"),
        ("speculative_model", "m", "DraftModel"),
    ],
)
def test_every_other_value_is_refused_with_what_to_use_here(name, value, reason):
    with pytest.raises(ValueError, match=f"^{name}={value!r} .*{reason}"):
        engine_settings({name: value}, EngineConfig)


def test_an_unknown_name_is_told_with_a_close_one():
    with pytest.raises(TypeError, match="max_modle_len=5 is no setting of LLM; did you mean max_model_len"):
        LLM("a-model", max_modle_len=5)
    with pytest.raises(TypeError, match=r"xyzzy=5 is no setting of LLM: see jpaged.config.EngineConfig"):
        LLM("a-model", xyzzy=5)


def test_swap_space_alone_swaps_where_it_pays_and_zero_is_none():
    assert engine_settings({"swap_space": 4}, EngineConfig) == {"swap_space": 4, "preemption_mode": "auto"}
    assert engine_settings({"swap_space": 4, "preemption_mode": "swap"}, EngineConfig)["preemption_mode"] == "swap"
    assert engine_settings({"swap_space": 0}, EngineConfig) == {}
    replicas = {"swap_space": 4, "data_parallel_size": 2}
    assert engine_settings(replicas, EngineConfig) == replicas | {"preemption_mode": "auto"}
    with pytest.raises(ValueError, match=r"swap_space=4\.0 needs preemption_mode='swap' or 'auto'"):
        EngineConfig(model="m", **engine_settings({"swap_space": 4, "preemption_mode": "recompute"}, EngineConfig))


def test_attributes_of_vllms_llm_are_named_with_what_to_use():
    with pytest.raises(AttributeError, match=r"llm_engine.*LLM.get_tokenizer\(\), LLM.stats\(\)"):
        LLM.__new__(LLM).llm_engine  # noqa: B018
    assert missing_attribute("LLM", "nothing") == "'LLM' object has no attribute 'nothing'"


def test_an_unknown_sampling_parameter_is_named_with_the_one_that_was_meant():
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'max_token'; did you mean max_tokens\?"):
        SamplingParams(max_token=3)
