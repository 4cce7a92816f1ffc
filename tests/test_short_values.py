"""An error quotes at most 80 characters of a value, through whichever door the value came."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from thorough import examples
from tiny_chat_model import make_chat_model
from typer.testing import CliRunner

from jpaged import LLM, BeamSearchParams, PoolingParams, SamplingParams, StructuredOutputsParams
from jpaged.cli.main import app
from jpaged.config import EngineConfig
from jpaged.short_values import MOST_MESSAGE, MOST_QUOTED, with_short_values

TEXT = "the cab " * 1300
VALUES = (TEXT, [TEXT], [3] * 4000, tuple(range(3000)), {TEXT: TEXT}, {str(i): i for i in range(2000)}, 10**9999)
"""Values of ten thousand characters and more."""
NEEDED = {BeamSearchParams: {"beam_width": 2}, EngineConfig: {"model": "m"}}
CLASSES = (SamplingParams, BeamSearchParams, PoolingParams, StructuredOutputsParams, EngineConfig)


def refusal(call) -> str:
    """Return the message with which a call refuses its argument, or "" if it takes it."""
    try:
        call()
    except (ValueError, TypeError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", CLASSES)
def test_no_parameter_that_is_refused_is_quoted_whole(kind):
    refused = 0
    for one in fields(kind):
        for value in VALUES:
            message = refusal(lambda name=one.name, value=value: kind(**NEEDED.get(kind, {}) | {name: value}))
            assert len(message) <= MOST_MESSAGE, (one.name, message[:100])
            refused += bool(message)
    assert refused > 2 * len(fields(kind))


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    """An engine that runs no step, and so compiles nothing."""
    folder = tmp_path_factory.mktemp("model")
    make_chat_model(folder)
    return LLM(str(folder), max_model_len=64)


def test_no_argument_of_a_call_is_quoted_whole(llm):
    calls = [
        lambda: LLM(TEXT),
        lambda: LLM("m", dtype=TEXT),
        lambda: LLM("m", **{TEXT: 1}),
        lambda: llm.generate({"prompt_token_ids": [-1] * 5000}),
        lambda: llm.generate({"prompt_token_ids": [TEXT]}),
        lambda: llm.generate({TEXT: 1}),
        lambda: llm.generate({"prompt": "a", "cache_salt": [TEXT]}),
        lambda: llm.generate([[1]], [SamplingParams()] * 3000),
        lambda: llm.generate([[1]], TEXT),
        lambda: llm.generate([[1]], use_tqdm=TEXT),
        lambda: llm.generate([[1]], on_error=TEXT),
        lambda: llm.generate([[1]], priority=TEXT),
        lambda: llm.generate([[1]], lora_request=TEXT),
        lambda: llm.generate([[1]], tokenization_kwargs={TEXT: 1}),
        lambda: llm.generate([[1]], SamplingParams(logit_bias={10**6 + i: 1.0 for i in range(300)})),
        lambda: llm.generate([[1]], SamplingParams(stop_token_ids=[10**6] * 300)),
        lambda: llm.chat([{"role": TEXT, "content": 1}]),
        lambda: llm.chat([{"role": "user", "content": [{"type": TEXT}]}]),
        lambda: llm.embed([[1]], TEXT),
        lambda: llm.memory_report(replica=TEXT),
        lambda: llm.sleep(TEXT),
        lambda: llm.wake_up([TEXT]),
    ]
    for number, call in enumerate(calls):
        message = refusal(call)
        assert 0 < len(message) <= MOST_MESSAGE, (number, message[:100])


def commands():
    """Yield the names of each command, and the command."""
    top = typer.main.get_command(app)
    for name, command in top.commands.items():
        inner = getattr(command, "commands", {"": command})
        yield from (([name, *filter(None, [part])], one) for part, one in inner.items())


@pytest.mark.parametrize(("names", "command"), [pytest.param(*each, id=" ".join(each[0])) for each in commands()])
def test_no_flag_that_is_refused_is_quoted_whole(names, command):
    for flag in command.params:
        if not getattr(flag, "is_flag", True):
            result = CliRunner().invoke(app, [*names, "--model", "./none", flag.opts[0], TEXT])
            # Lists of what it could have been, and what engines of other tests say meanwhile, do not count.
            said = re.sub(r"known .*|one of .*|^compiling program .*\n", "", result.output, flags=re.MULTILINE)
            assert result.exit_code and len(said) <= MOST_MESSAGE, (flag.opts, result.output)


def test_the_limit_after_a_long_value_and_the_end_of_a_path_stay():
    path = f"/home/{'folder/' * 30}config.json"
    assert with_short_values(f"stop={['a' * 9] * 99} must be in [1, 2]").endswith("'] must be in [1, 2]")
    assert with_short_values(f"model={path!r} is missing").endswith("/config.json' is missing")
    assert with_short_values(f"{path}: no such file") == f"{path}: no such file"
    assert (
        with_short_values(f"the model's words (a {'long ' * 30}text) stay")
        == f"the model's words (a {'long ' * 30}text) stay"
    )


@settings(max_examples=examples(90), deadline=None)
@given(
    st.recursive(
        st.text() | st.integers() | st.binary(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=8,
    )
)
def test_any_value_leaves_the_words_around_it(value):
    message = with_short_values(f"field={value!r} must be a date")
    assert message.startswith("field=") and message.endswith(" must be a date")
    assert len(message) <= MOST_QUOTED + len("field= must be a date")
