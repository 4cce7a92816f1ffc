"""Deltas of running requests: `LLM.stream` and the command line's use of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from greedy_reference import random_prompts
from tiny_chat_model import make_chat_model
from typer.testing import CliRunner

from jpaged import LLM, SamplingParams
from jpaged.cli.main import app
from jpaged.errors import GenerationInterrupted

DRAWN = SamplingParams(temperature=1.0, seed=7, max_tokens=24, ignore_eos=True)
TEXT = "the cab is far"
PROMPTS = random_prompts(lengths=(3, 9, 17, 20, 33))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat-model")
    make_chat_model(folder)
    return str(folder)


@pytest.fixture(scope="module")
def engine(folder):
    settings = {"dtype": "float32", "block_size": 8, "max_num_seqs": 4, "max_model_len": 128}
    return LLM(folder, max_num_batched_tokens=64, **settings)


@pytest.fixture
def llm(engine):
    """The engine; after every test its memory is empty and sound."""
    yield engine
    assert_nothing_is_left(engine)


def assert_nothing_is_left(llm):
    assert llm.control.engine.memory.num_used_blocks == 0
    assert not llm.control.engine.has_work
    llm.control.engine.memory.check_invariants()


def joined(deltas):
    """{prompt index: (text, tokens, finish reason, stop reason)}; nothing may follow an output's end."""
    outputs = {}
    for delta in deltas:
        text, tokens, reason, _ = outputs.get(delta.prompt_index, ("", [], None, None))
        assert reason is None, "a delta after the last"
        outputs[delta.prompt_index] = (
            text + delta.text,
            tokens + delta.token_ids,
            delta.finish_reason,
            delta.stop_reason,
        )
    return outputs


def generated(llm, prompts, params):
    outputs = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
    return {i: (o.text, o.token_ids, o.finish_reason, o.stop_reason) for i, o in enumerate(outputs)}


def test_deltas_together_are_what_generate_returns(llm):
    params = [replace(DRAWN, seed=i, max_tokens=5 + 7 * i) for i in range(5)]
    deltas = list(llm.stream([{"prompt_token_ids": p} for p in PROMPTS], params))
    assert joined(deltas) == generated(llm, PROMPTS, params)


def test_tokens_come_one_by_one_as_they_are_drawn(llm):
    deltas = list(llm.stream(TEXT, DRAWN))
    assert [len(delta.token_ids) for delta in deltas] == [1] * 24
    assert [delta.finish_reason for delta in deltas] == [None] * 23 + ["length"]
    assert all(delta.text == llm.tokenizer.decode(delta.token_ids, skip_special_tokens=True) for delta in deltas)


def test_logprobs_come_with_their_tokens(llm):
    params = replace(DRAWN, logprobs=2)
    whole = llm.generate(TEXT, params, use_tqdm=False)[0].outputs[0].logprobs
    deltas = list(llm.stream(TEXT, params))
    assert all(len(delta.logprobs) == len(delta.token_ids) for delta in deltas)
    streamed = [entry for delta in deltas for entry in delta.logprobs]
    assert [list(entry) for entry in streamed] == [list(entry) for entry in whole]
    for ours, theirs in zip(streamed, whole, strict=True):
        for token in ours:
            assert ours[token].logprob == pytest.approx(theirs[token].logprob, abs=1e-4)
            assert (ours[token].rank, ours[token].decoded_token) == (theirs[token].rank, theirs[token].decoded_token)


def test_a_batch_streams_side_by_side(llm):
    order = [delta.prompt_index for delta in llm.stream([TEXT] * 3, DRAWN)]
    assert order == [0, 1, 2] * 24


def test_text_before_a_stop_string_is_shown_and_the_string_never(llm):
    whole = "".join(delta.text for delta in llm.stream(TEXT, DRAWN))
    stop = whole[8:14]
    before = whole[: whole.find(stop)]
    shown = ""
    for delta in llm.stream(TEXT, replace(DRAWN, stop=stop)):
        shown += delta.text
        assert before.startswith(shown)
    assert (shown, delta.finish_reason, delta.stop_reason) == (before, "stop", stop)


@pytest.mark.parametrize("include", [False, True])
def test_the_token_that_ends_it_is_streamed_as_generate_tells_it(llm, include):
    token = next(iter(llm.stream(TEXT, DRAWN))).token_ids[0]
    params = replace(DRAWN, seed=8, stop_token_ids=[token], include_stop_str_in_output=include, max_tokens=100)
    assert joined(llm.stream(TEXT, params)) == generated(llm, [TEXT], params)


def test_without_detokenize_tokens_are_streamed_without_text(llm):
    deltas = list(llm.stream(TEXT, replace(DRAWN, detokenize=False)))
    assert len(deltas) == 24
    assert all(delta.text == "" and len(delta.token_ids) == 1 for delta in deltas)


@pytest.mark.parametrize("leave", ["close", "break", "error"])
def test_leaving_a_stream_frees_its_blocks_at_once(llm, leave):
    stream = llm.stream([TEXT, "abc", "d"], DRAWN)
    next(stream)
    assert llm.control.engine.memory.num_used_blocks > 0
    if leave == "close":
        stream.close()
    elif leave == "error":
        with pytest.raises(KeyError):
            stream.throw(KeyError)
    else:
        for _ in stream:
            break
        del stream
    assert_nothing_is_left(llm)


def test_a_stream_that_nobody_began_holds_nothing(llm):
    stream = llm.stream(TEXT, DRAWN)
    assert_nothing_is_left(llm)
    stream.close()


def test_calls_in_the_middle_of_a_stream_lose_none_of_its_deltas(llm):
    alone = generated(llm, [TEXT, "abc"], DRAWN)
    first, second = llm.stream(TEXT, DRAWN), llm.stream("abc", DRAWN)
    some, other = [next(first) for _ in range(3)], [next(second)]
    assert generated(llm, ["d"], replace(DRAWN, max_tokens=6))[0][2] == "length"
    some.append(next(first))
    assert len(some[-1].token_ids) > 1, "what generate ran meanwhile comes at once"
    other += second
    some += first
    assert joined(some)[0] == alone[0]
    assert joined(other)[0] == alone[1]


def test_closing_one_stream_leaves_the_others_alone(llm):
    alone = generated(llm, [TEXT], DRAWN)
    first, second = llm.stream(TEXT, DRAWN), llm.stream(PROMPTS, DRAWN)
    some = [next(first)]
    next(second)
    second.close()
    assert joined([*some, *first]) == alone


def test_bad_prompts_are_refused_before_anything_runs(llm):
    with pytest.raises(ValueError, match="prompt 1: the prompt has 0 tokens"):
        llm.stream([TEXT, {"prompt_token_ids": []}], DRAWN)
    with pytest.raises(ValueError, match="2 sampling_params for 1 prompts"):
        llm.stream(TEXT, [DRAWN] * 2)
    with pytest.raises(ValueError, match="prompt 0: prompt_logprobs=1: deltas have no place"):
        llm.stream(TEXT, replace(DRAWN, prompt_logprobs=1))


def test_a_prompt_that_could_never_fit_leaves_nothing_behind(llm, folder):
    size = 10 * llm.memory_report().page_bytes
    settings = {"dtype": "float32", "block_size": 8, "max_num_seqs": 4, "max_model_len": 128}
    tight = LLM(folder, max_num_batched_tokens=64, kv_cache_memory_bytes=size, **settings)
    with pytest.raises(ValueError, match="can never fit"):
        next(tight.stream([TEXT, [5] * 100], DRAWN))
    assert_nothing_is_left(tight)


# ---------------------------------------------------------------------- the command line


def run(*arguments, **options):
    return CliRunner().invoke(app, list(arguments), **options)


def test_generate_prints_a_stream_of_one_prompt(llm, folder):
    options = ("--model", folder, "--max-tokens", "8", "--ignore-eos", "--max-num-seqs", "1", "--max-model-len", "64")
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    result = run("generate", TEXT, "--stream", *options)
    assert result.stdout == TEXT + generated(llm, [TEXT], greedy)[0][0] + "\n"
    refused = run("generate", TEXT, "again", "--stream", *options)
    assert refused.exit_code == 2
    assert "one prompt, not 2" in refused.output


def test_chat_prints_the_answers_of_a_conversation(llm, folder):
    result = run("chat", "--model", folder, "--max-tokens", "8", "--max-model-len", "128", input="hi\ncd\n")
    greedy = SamplingParams(temperature=0, max_tokens=8)
    messages, answers = [], []
    for line in ("hi", "cd"):
        messages.append({"role": "user", "content": line})
        answers.append(llm.chat(messages, greedy, use_tqdm=False)[0].outputs[0].text)
        messages.append({"role": "assistant", "content": answers[-1]})
    assert result.stdout == "\n".join([*answers, ""])  # prompts are for terminals


def test_ctrl_c_in_generate_keeps_the_text_so_far(llm, monkeypatch):
    steps, step = [], llm.control.engine.step

    def interrupted():
        steps.append(1)
        if len(steps) == 12:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm.control.engine, "step", interrupted)
    params = [SamplingParams(temperature=0, max_tokens=most, ignore_eos=True) for most in (2, 60)]
    with pytest.raises(KeyboardInterrupt) as interrupt:
        llm.generate([TEXT, TEXT + " away"], params, use_tqdm=False)
    monkeypatch.undo()
    assert isinstance(interrupt.value, GenerationInterrupted)
    ended, cut = (output.outputs[0] for output in interrupt.value.outputs)
    assert (ended.finish_reason, cut.finish_reason) == ("length", "abort") and 2 < len(cut.token_ids) < 60
    whole = llm.generate(TEXT + " away", params[1], use_tqdm=False)[0].outputs[0]
    assert whole.token_ids[: len(cut.token_ids)] == cut.token_ids and whole.text.startswith(cut.text)
