"""An argument that is refused raises from the call; a fault keeps its traceback."""

import traceback

import pytest
from tiny_chat_model import make_chat_model

from jpaged import LLM, BeamSearchParams, PoolingParams, SamplingParams
from jpaged.short_tracebacks import short_traceback
from jpaged.validation import integer


def inside(error):
    """Return the frames of an error after the test's own."""
    return traceback.extract_tb(error.__traceback__)[1:]


def plain(call):
    with pytest.raises((ValueError, TypeError)) as refused:
        call()
    return refused.value


@pytest.mark.parametrize(
    "call",
    [
        lambda: SamplingParams(temperatur=1),
        lambda: SamplingParams(temperature=-1),
        lambda: SamplingParams(stop=[""]),
        lambda: BeamSearchParams(beam_width=0),
        lambda: PoolingParams(dimensions=0),
        lambda: LLM("smollm2-135m", max_model_length=3),
        lambda: LLM("./none"),
        lambda: LLM(""),
    ],
)
def test_a_refused_argument_has_one_frame_of_the_package_and_no_cause(call):
    error = plain(call)
    assert len(inside(error)) - 1 <= 1  # the lambda is a frame too
    assert error.__cause__ is None and (error.__suppress_context__ or error.__context__ is None)


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    """An engine that runs no step, and so compiles nothing."""
    folder = tmp_path_factory.mktemp("model")
    make_chat_model(folder)
    return LLM(str(folder), max_model_len=64)


@pytest.mark.parametrize(
    "call",
    [
        lambda llm: llm.generate([[1] * 100]),
        lambda llm: llm.generate([[1]], use_tqdm=3),
        lambda llm: list(llm.stream([[1] * 100])),
        lambda llm: llm.embed([[]]),
        lambda llm: llm.chat([{"role": "user", "content": "hi"}], continue_final_message=True),
        lambda llm: llm.memory_report(replica=3),
    ],
)
def test_a_refused_prompt_has_one_frame_and_no_cause(llm, call):
    error = plain(lambda: call(llm))
    assert len(inside(error)) - 2 <= 1  # two lambdas
    assert error.__cause__ is None and error.__suppress_context__


def test_a_fault_keeps_its_traceback_and_its_cause():
    def python_raises(value):
        return int(value)

    def refuses(value):
        return integer("value", value, low=1)

    assert [frame.name for frame in inside(plain(lambda: short_traceback(python_raises)("x")))][1:] == [
        "short",
        "python_raises",
    ]
    assert [frame.name for frame in inside(plain(lambda: short_traceback(refuses)(0)))][1:] == ["short"]


def test_a_refusal_in_the_middle_of_a_step_is_a_fault(llm, monkeypatch):
    def schedule(*_, **__):
        integer("tokens", 0, low=1)

    monkeypatch.setattr(llm.control.engine.replicas[0].scheduler, "schedule", schedule)
    error = plain(lambda: llm.generate([[1, 2]], use_tqdm=False))
    assert {"step", "schedule", "integer"} <= {frame.name for frame in inside(error)}
