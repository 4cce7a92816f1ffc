"""The setting of how thoughts end, in vLLM's words."""

import pytest

from jpaged import ReasoningConfig, SamplingParams
from jpaged.config import EngineConfig
from jpaged.engine.saved_state.keeper import settings_data, settings_of
from jpaged.engine_args import EngineArgs

SAID = {"reasoning_start_str": "<think>", "reasoning_end_str": "I have to answer now.</think>"}


def read(config):
    return EngineConfig(model="m", reasoning_config=config).reasoning_config


def test_a_config_an_object_and_json_are_one():
    from jpaged.config import ReasoningConfig as OfVllm

    assert read(OfVllm(**SAID)) == read(SAID) == ReasoningConfig(**SAID)
    assert read('{"reasoning_end_str": "now"}') == ReasoningConfig(reasoning_end_str="now")
    assert read(None) is None and read({}) == ReasoningConfig()
    assert EngineArgs("m", reasoning_config=SAID).settings() == {"reasoning_config": SAID}


@pytest.mark.parametrize("config", ['"now"', '{"reasoning_end_str": 5}', "now", 5, {"reasoning_end": "now"}, ["now"]])
def test_a_config_that_is_none_is_refused(config):
    with pytest.raises(ValueError, match="reasoning_config"):
        read(config)


def test_a_request_says_more_than_the_engine():
    config = ReasoningConfig(reasoning_parser="think", **SAID)
    end = SAID["reasoning_end_str"]
    assert config.missing_in(SamplingParams(thinking_token_budget=5)) == {
        "reasoning_parser": "think",
        "reasoning_end_str": end,
    }
    own = SamplingParams(thinking_token_budget=5, reasoning_end_str="b", reasoning_parser="seed_oss")
    assert config.missing_in(own) == {} == config.missing_in(SamplingParams())


def test_a_saved_state_keeps_it():
    config = EngineConfig(model="m", reasoning_config=SAID)
    assert settings_of(settings_data(config))["reasoning_config"] == ReasoningConfig(**SAID)
