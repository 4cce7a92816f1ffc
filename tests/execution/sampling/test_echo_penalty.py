"""An edit from outside: `echo_penalty.py` is one file, and no file of `jpaged` knows it."""

from __future__ import annotations

import numpy as np
import pytest
from echo_penalty import EchoParams, EchoPenalty, EchoRows
from tiny_chat_model import make_chat_model

from jpaged import LLM, SamplingParams
from jpaged.engine.step_dump import VARIABLE, replay_step
from jpaged.execution.sampling.registry import EDITS, check_edits
from jpaged.execution.sampling.sampling_batch import blank_rows
from jpaged.execution.step_dump import DumpedStep
from jpaged.execution.wire import decode, encode

PROMPTS = [[5, 9, 9], [30, 31, 32, 33, 34, 35, 36, 37, 38], [7] * 20]
GREEDY = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True}
ECHOING = {5: 50.0, 6: 49.5}
"""A bias by which a greedy model gives token 5 forever, and 5 and 6 in turns where none may come twice."""


@pytest.fixture(scope="module", autouse=True)
def registered():
    check_edits([*EDITS, EchoPenalty()], EchoParams)
    EDITS.append(edit := EchoPenalty())
    yield
    EDITS.remove(edit)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_chat_model(folder)
    return folder


def engine(folder) -> LLM:
    sizes = {"block_size": 8, "max_num_seqs": 3, "max_model_len": 64, "max_num_batched_tokens": 16}
    return LLM(str(folder), dtype="float32", **sizes)


@pytest.fixture(scope="module")
def llm(folder):
    return engine(folder)


def tokens(llm, prompts, params) -> list[list[int]]:
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def test_its_parameter_is_checked_by_its_range():
    assert EchoParams(echo_penalty=np.float32(2)).echo_penalty == 2.0
    with pytest.raises(ValueError, match=r"echo_penalty=101 is outside \[0.0, 100.0\]"):
        EchoParams(echo_penalty=101)
    with pytest.raises(TypeError, match="echo_penalty"):
        SamplingParams(echo_penalty=1.0)


def test_the_engine_applies_it_to_tokens_that_the_host_has_not_seen_yet(llm):
    without, with_it = (EchoParams(**GREEDY, logit_bias=ECHOING, echo_penalty=penalty) for penalty in (0.0, 100.0))
    assert tokens(llm, PROMPTS[:1], without) == [[5] * 6]
    assert tokens(llm, PROMPTS[:1], with_it) == [[5, 6] * 3]
    one_by_one = [*PROMPTS[1]]
    params = EchoParams(temperature=0.0, max_tokens=1, ignore_eos=True, echo_penalty=3.0)
    for _ in range(6):
        one_by_one += tokens(llm, [one_by_one], params)[0]
    assert tokens(llm, PROMPTS[1:2], EchoParams(**GREEDY, echo_penalty=3.0)) == [one_by_one[len(PROMPTS[1]) :]]


def test_rows_that_do_not_ask_keep_their_tokens(llm):
    params = [SamplingParams(**GREEDY), EchoParams(**GREEDY, echo_penalty=5.0), SamplingParams(seed=3, max_tokens=6)]
    alone = [tokens(llm, [prompt], each)[0] for prompt, each in zip(PROMPTS, params, strict=True)]
    assert tokens(llm, PROMPTS, params) == alone


def test_its_arrays_are_sent_to_other_processes():
    args = blank_rows(4, 100)
    (got,) = decode(encode("draw", (args,)))[1]
    assert isinstance(got.edits[-1], EchoRows) and all(map(np.array_equal, got.edits[-1], args.edits[-1]))


def test_a_dumped_step_runs_again_with_it(folder, tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    llm = engine(folder)
    given = tokens(llm, PROMPTS[:1], EchoParams(**GREEDY, logit_bias=ECHOING, echo_penalty=100.0))
    dumps = [DumpedStep.read(path) for path in sorted(tmp_path.glob("step-*.jpaged"))]
    assert [int(dump.drawn.tokens[0]) for dump in dumps] == given[0]
    assert replay_step(sorted(tmp_path.glob("step-*.jpaged"))[-1]).is_same
    assert all(isinstance(dump.sampling.edits[-1], EchoRows) and dump.sampling.edits[1] is None for dump in dumps)
