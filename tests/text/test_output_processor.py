"""What readers get of a request while it runs: deltas that add up, outputs that stay as they are, at a linear cost."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kinds_of_tokenizers import byte_level, cached
from small_schedulers import make_request
from thorough import examples

from jpaged.outputs import Logprob
from jpaged.scheduling import Status
from jpaged.scheduling.request import find_stop
from jpaged.scheduling.top_tokens import TokenRanking
from jpaged.text.detokenizer import Detokenizer
from jpaged.text.output_processor import OutputProcessor
from jpaged.text.token_reader import Progress, TokenReader

EOS = 260
TEXT = "a 😀 and 日本 then STOP it"


@pytest.fixture(scope="module")
def outputs():
    return OutputProcessor(byte_level())


def request_for(outputs, **params):
    request = make_request([5, 6], 100, eos=[EOS], logprobs=2, **params)
    if request.params.stop_strings:
        for seq in request.sequences:
            seq.stop_search = Detokenizer(outputs.tokenizer, request.params, request.prompt_token_ids)
    return request


def generate(request, seq, token):
    """Take a token in as the scheduler does."""
    seq.token_ids.append(token)
    seq.cumulative_logprob -= 0.5
    seq.logprobs.append((-0.5, TokenRanking(2, [7, token], [-0.1, -0.5])))
    seq.finish_reason, seq.stop_reason = find_stop(request, seq) or (None, None)
    if not request.live:
        request.status = Status.FINISHED


def ids(outputs, text):
    return outputs.tokenizer.encode(text, add_special_tokens=False)


@settings(max_examples=examples(60), deadline=None)
@given(reads=st.lists(st.booleans(), min_size=40, max_size=40), stop=st.sampled_from([None, "STOP", "zzz"]))
def test_deltas_add_up_to_the_whole_however_often_they_are_read(reads, stop):
    outputs = OutputProcessor(byte_level())
    request = request_for(outputs, stop=stop)
    (seq,) = request.sequences
    reader, builder, deltas = TokenReader(request), outputs.builder(request, "name"), []
    for token, looked in zip([*ids(outputs, TEXT), EOS], [*reads, True], strict=False):
        generate(request, seq, token)
        if (looked or seq.finished) and (progress := reader.read()) is not None:
            builder.add(progress)
            deltas.append(builder.delta())
        if seq.finished:
            break
    whole = outputs.whole(request).outputs[0]
    told = [output for delta in deltas for output in delta.outputs]
    assert "".join(output.text for output in told) == whole.text == (TEXT if stop != "STOP" else "a 😀 and 日本 then ")
    assert [token for output in told for token in output.token_ids] == whole.token_ids
    assert [entry for output in told for entry in output.logprobs] == whole.logprobs
    assert told[-1].cumulative_logprob == whole.cumulative_logprob
    assert (told[-1].finish_reason, told[-1].stop_reason) == ("stop", "STOP" if stop == "STOP" else None)
    assert [delta.finished for delta in deltas] == [False] * (len(deltas) - 1) + [True]
    assert reader.done and reader.read() is None
    assert {delta.request_id for delta in deltas} == {"name"}


@settings(max_examples=examples(60), deadline=None)
@given(
    reads=st.lists(st.booleans(), min_size=40, max_size=40),
    stop=st.sampled_from([None, "STOP", "<s", "s> now"]),
    skip=st.booleans(),
)
def test_deltas_say_where_added_tokens_stand_in_their_text(reads, stop, skip):
    outputs = OutputProcessor(byte_level())
    tokenizer = outputs.tokenizer
    text = "spelt s>,<s> now é</s> then<s>"
    request = request_for(outputs, stop=stop, skip_special_tokens=skip)
    (seq,) = request.sequences
    reader, builder, told, found = TokenReader(request), outputs.builder(request), "", []
    for token, looked in zip([*ids(outputs, text), EOS], [*reads, True], strict=False):
        generate(request, seq, token)
        if (looked or seq.finished) and (progress := reader.read()) is not None:
            builder.add(progress)
            for output in builder.delta().outputs:
                for span in output.added_token_spans:
                    shown = output.text[span.start : span.end]
                    assert shown == tokenizer.convert_ids_to_tokens(span.token_id) or (skip and not shown)
                    found.append((len(told) + span.start, len(told) + span.end, span.token_id))
                told += output.text
        if seq.finished:
            break
    whole = outputs.whole(request).outputs[0]
    assert told == whole.text and found == whole.added_token_spans
    tokens = tokenizer.convert_tokens_to_ids(["<s>", "</s>", "<s>"])
    cut = stop in ("<s", "s> now") and not skip
    assert [span.token_id for span in whole.added_token_spans] == ([] if cut else tokens)


def test_an_output_stays_as_it_is_when_more_comes(outputs):
    request = request_for(outputs)
    (seq,) = request.sequences
    reader, builder, seen = TokenReader(request), outputs.builder(request), []
    for token in ids(outputs, "abc"):
        generate(request, seq, token)
        builder.add(reader.read())
        seen.append(builder.cumulative().outputs[0])
    assert [output.text for output in seen] == ["a", "ab", "abc"]
    assert [len(output.token_ids) for output in seen] == [len(output.logprobs) for output in seen] == [1, 2, 3]


def test_each_token_becomes_text_and_log_probabilities_once(outputs, monkeypatch):
    """The cost of a step does not grow with what was generated before it."""
    request, made = request_for(outputs), []
    (seq,) = request.sequences
    monkeypatch.setattr(outputs, "logprobs", lambda token, *entry: made.append(token) or {})
    reader, builder = TokenReader(request), outputs.builder(request)
    tokens = [9, 10, 11] * 20
    for token in tokens:
        generate(request, seq, token)
        progress = reader.read()
        assert [(new.token_ids, len(new.logprobs)) for new in progress.outputs] == [([token], 1)]
        builder.add(progress)
        builder.cumulative()
    assert made == tokens


class Piece(str):
    """A text that must not be added to another: with every token the whole text would be copied."""

    def __radd__(self, other):
        raise AssertionError("the text so far is copied")


def test_the_text_so_far_is_not_copied_for_a_token(outputs):
    request = request_for(outputs)
    (seq,) = request.sequences
    reader, builder, deltas = TokenReader(request), outputs.builder(request), []
    for token in [9, 10, 11]:
        generate(request, seq, token)
        (new,) = reader.read().outputs
        builder.add(Progress([replace(new, text=Piece("ab"))], finished=False))
        deltas += [builder.delta().outputs[0].text] if token != 10 else []
    assert deltas == ["ab", "abab"] and builder.cumulative().outputs[0].text == "ababab"


def test_only_outputs_with_something_new_are_in_a_delta(outputs):
    request = request_for(outputs, width=3)
    reader, builder = TokenReader(request), outputs.builder(request)
    assert reader.read() is None
    for seq in (request.sequences[0], request.sequences[2]):
        generate(request, seq, 9)
    builder.add(reader.read())
    assert [output.index for output in builder.delta().outputs] == [0, 2]
    generate(request, request.sequences[2], EOS)
    builder.add(reader.read())
    (ended,) = builder.delta().outputs
    assert (ended.index, ended.text, ended.token_ids, ended.finish_reason) == (2, "", [EOS], "stop")
    assert [output.finish_reason for output in builder.cumulative().outputs] == [None, None, "stop"]
    assert builder.delta().outputs == []


def test_a_reader_of_the_whole_is_told_nothing_before_the_end(outputs):
    request = request_for(outputs)
    (seq,) = request.sequences
    reader = TokenReader(request, whole=True)
    generate(request, seq, 9)
    assert reader.read() is None
    generate(request, seq, EOS)
    (new,) = reader.read().outputs
    assert (new.token_ids, new.num_shown, new.finish_reason) == ([9, EOS], 1, "stop")


def test_the_prompts_log_probabilities_come_once_in_deltas_and_always_in_the_whole(outputs):
    request = request_for(outputs, prompt_logprobs=1)
    (seq,) = request.sequences
    reader, builder = TokenReader(request), outputs.builder(request)
    request.prompt_logprobs[1] = (-2.0, TokenRanking(1, [6], [-2.0]))
    found = []
    for token in (9, 10):
        generate(request, seq, token)
        builder.add(reader.read())
        found.append((builder.delta().prompt_logprobs, builder.cumulative().prompt_logprobs))
    scored = [None, {6: Logprob(-2.0, 1, outputs.tokenizer.decode([6]))}]
    assert found == [(scored, scored), (None, scored)]


@pytest.mark.parametrize("kind", ["sentencepiece", "metaspace"])
def test_a_token_keeps_the_space_it_begins_with(kind):
    tokenizer = cached(kind)
    tokens = tokenizer.convert_tokens_to_ids(["s", "▁the", "▁cab", "s", "▁▁", "▁", "▁.", "日本"])
    texts = [OutputProcessor(tokenizer).decoded(token) for token in tokens]
    assert texts == ["s", " the", " cab", "s", "  ", " ", " .", "日本"]
    assert "".join(texts) == tokenizer.decode(tokens)
