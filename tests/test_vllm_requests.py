"""What requests and imports of a script for vLLM meet here."""

from __future__ import annotations

import pickle

import pytest

import jpaged
from jpaged import BeamSearchParams, PoolingParams, SamplingParams, StructuredOutputsParams


def test_parameters_can_be_cloned_and_pickled():
    structure = StructuredOutputsParams(json={"type": "object"})
    params = SamplingParams(n=3, logit_bias={5: 1.0}, stop=["x"], structured_outputs=structure)
    for copy in (params.clone(), pickle.loads(pickle.dumps(params))):
        assert copy == params and copy is not params
        assert copy.logit_bias is not params.logit_bias and copy.structured_outputs is not structure


def test_a_parameter_that_is_changed_is_checked_with_all_others():
    params = SamplingParams(max_tokens=5, stop=["x"])
    params.max_tokens, params.stop = 9, "y"
    assert params == SamplingParams(max_tokens=9, stop=["y"]) and params.stop_strings == ("y",)
    with pytest.raises(ValueError, match="min_tokens=10 is above max_tokens=9"):
        params.min_tokens = 10
    with pytest.raises(TypeError, match="temprature"):
        params.temprature = 1.0
    with pytest.raises(TypeError, match="give structured_outputs"):
        params.guided_decoding = None
    assert params == SamplingParams(max_tokens=9, stop=["y"])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("guided_decoding", r"guided_decoding .*: give structured_outputs=StructuredOutputsParams"),
        ("best_of", "best_of .*: give n, and choose among the outputs"),
        ("logits_processors", "logits_processors .*: logit_bias, allowed_token_ids"),
        ("use_beam_search", r"use_beam_search .*: call beam_search\(\)"),
    ],
)
def test_parameters_that_are_vllms_alone_say_what_to_use(name, message):
    with pytest.raises(TypeError, match=message):
        SamplingParams(**{name: None})


def test_other_parameters_are_unknown():
    with pytest.raises(TypeError, match="unexpected keyword argument 'temprature'"):
        SamplingParams(temprature=1.0)


def test_names_that_cannot_be_imported_say_what_to_use():
    with pytest.raises(ImportError, match="use StructuredOutputsParams, with the same arguments"):
        from jpaged import GuidedDecodingParams
    with pytest.raises(ImportError, match="use StructuredOutputsParams, with the same arguments"):
        from jpaged.sampling_params import GuidedDecodingParams  # noqa: F401
    with pytest.raises(ImportError, match="use LLM, or AsyncLLM to add and abort requests"):
        from jpaged import LLMEngine  # noqa: F401
    with pytest.raises(ImportError, match="cannot import name 'Nothing'"):
        from jpaged import Nothing  # noqa: F401
    assert not hasattr(jpaged, "nothing")


def test_public_names_are_listed_and_all_can_be_imported():
    assert {"LLM", "SamplingParams", "TextPrompt", "TokensPrompt", "StructuredOutputsParams"} <= set(dir(jpaged))
    assert all(getattr(jpaged, name) is not None for name in dir(jpaged))


def test_homes_of_types_are_vllms():
    from jpaged.inputs import PromptType, TextPrompt, TokensPrompt
    from jpaged.outputs import CompletionOutput, RequestOutput
    from jpaged.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams, StructuredOutputsParams

    assert (TextPrompt, TokensPrompt, RequestOutput) == (jpaged.TextPrompt, jpaged.TokensPrompt, jpaged.RequestOutput)
    assert all([PromptType, CompletionOutput, BeamSearchParams, RequestOutputKind])
    assert (SamplingParams, StructuredOutputsParams) == (jpaged.SamplingParams, jpaged.StructuredOutputsParams)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens=0 must be at least 1, or -1"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens=-2 must be at least -1"),
        ({"spaces_between_special_tokens": 1}, "spaces_between_special_tokens=1 must be True or False"),
        ({"n": 16385}, r"n=16385 must be in \[1, 16384\]"),
    ],
)
def test_values_out_of_range_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**given)


def test_beams_take_the_neutral_values_of_vllms_parameters_and_refuse_others():
    BeamSearchParams(2, 4, temperature=0.0, include_stop_str_in_output=False)
    with pytest.raises(ValueError, match=r"temperature=0\.7 must be 0"):
        BeamSearchParams(2, 4, temperature=0.7)
    with pytest.raises(ValueError, match="include_stop_str_in_output=True must be False"):
        BeamSearchParams(2, 4, include_stop_str_in_output=True)


def test_optional_parameters_that_are_none_have_their_defaults():
    assert SamplingParams.from_optional(temperature=0.5, top_k=None, n=None) == SamplingParams(temperature=0.5)
    assert SamplingParams.from_optional(logit_bias={"7": 1.5, 8: 2.0}).logit_bias == {7: 1.5, 8: 2.0}
    with pytest.raises(ValueError, match="'x' must be an integer"):
        SamplingParams.from_optional(logit_bias={"x": 1.5})
    assert SamplingParams(seed=-1) == SamplingParams()


@pytest.mark.parametrize("name", ["whitespace_pattern", "structural_tag", "disable_fallback"])
def test_shapes_refuse_vllms_other_parameters_with_what_to_use(name):
    with pytest.raises(TypeError, match=f"{name} is a parameter of vLLM that StructuredOutputsParams has not: "):
        StructuredOutputsParams(json_object=True, **{name: "a"})


@pytest.mark.parametrize("name", ["truncate_prompt_tokens", "task", "softmax"])
def test_poolings_refuse_vllms_other_parameters_with_what_to_use(name):
    with pytest.raises(TypeError, match=f"{name} is a parameter of vLLM that PoolingParams has not: "):
        PoolingParams(pooling="mean", **{name: 1})
    with pytest.raises(TypeError, match="unexpected keyword argument 'poling'"):
        PoolingParams(poling="mean")


def test_only_json_has_white_space_to_be_left_out():
    assert StructuredOutputsParams(json_object=True, disable_any_whitespace=True).kind == "json_object"
    with pytest.raises(ValueError, match="disable_any_whitespace=True needs json or json_object"):
        StructuredOutputsParams(regex="a", disable_any_whitespace=True)
