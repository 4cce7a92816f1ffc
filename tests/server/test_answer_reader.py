"""An answer is the same events however the engine cuts it, and every call that begins ends, whole or cut."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thorough import examples
from tiny_chat_model import byte_level_tokenizer

from jpaged import CompletionOutput, RequestOutput, SamplingParams
from jpaged.outputs import RESTORED, TokenSpan
from jpaged.server.messages.turn_form import TurnForm
from jpaged.server.turn import Arguments, Begun, CallBegun, CallEnded, Ended, Text, Thought, Tool, Turn

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "é}"}}\n</tool_call>'
THOUGHT = "<think>hm</think>\n\n"
TEXTS = ("plain", f"so\n{CALL}", f"{THOUGHT}{CALL}\n{CALL}", "<think>open", CALL[:-20], f"{THOUGHT}b")
TOKENIZER = byte_level_tokenizer()


def reader(**fields):
    turn = Turn(messages=[{"role": "user", "content": "a"}], params=SamplingParams(), tools=[Tool("f")], **fields)
    form = TurnForm(turn, TOKENIZER, tool_parser="hermes", reasoning_parser="think")
    form.follow("a")
    return form.answer_reader()


def events_of(pieces, reason="stop", stop=None, **fields):
    reading, found = reader(**fields), []
    for i, text in enumerate(pieces):
        last = i == len(pieces) - 1
        one = CompletionOutput(0, text, [i], None, reason if last else None, stop if last else None)
        found += reading.read(RequestOutput("r", "a", [1, 2, 3], [one], num_cached_tokens=2), one).events
    return found


def together(events):
    """Join neighbouring events of one text."""
    found = []
    for event in events:
        if found and isinstance(event, Text | Thought | Arguments) and type(found[-1]) is type(event):
            more = found.pop()
            event = type(event)(*([event.index] if isinstance(event, Arguments) else []), more.text + event.text)
        found.append(event)
    return found


@given(st.sampled_from(TEXTS), st.lists(st.integers(1, 80), max_size=6), st.sampled_from(["stop", "length"]))
@settings(max_examples=examples(60), deadline=None)
def test_events_do_not_depend_on_where_the_text_is_cut(text, cuts, reason):
    bounds = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[a:b] for a, b in itertools.pairwise(bounds)]
    whole, streamed = together(events_of([text], reason)), together(events_of(pieces, reason))
    assert whole[:-1] == streamed[:-1] and whole[-1].reason == streamed[-1].reason
    assert whole[0] == Begun(3, 2) and isinstance(whole[-1], Ended)
    assert [e.index for e in whole if isinstance(e, CallBegun)] == [e.index for e in whole if isinstance(e, CallEnded)]
    calls = 0
    for event in whole:  # a call is open until it ends, and nothing else comes meanwhile
        calls += isinstance(event, CallBegun) - isinstance(event, CallEnded)
        assert calls in (0, 1) and (not calls or isinstance(event, CallBegun | Arguments))


def test_a_mark_that_is_a_token_counts_only_as_that_token():
    tokenizer = byte_level_tokenizer()
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"], special_tokens=False)
    turn = Turn(messages=[{"role": "user", "content": "a"}], params=SamplingParams(), tools=[Tool("f")])
    form = TurnForm(turn, tokenizer, tool_parser="hermes")
    spelt, calls = "Write <tool_call>\n{", tokenizer.convert_tokens_to_ids(["<tool_call>", "</tool_call>"])
    at = len(spelt), len(spelt) + CALL.index("</")
    marks = zip(at, ("<tool_call>", "</tool_call>"), calls, strict=True)
    spans = [TokenSpan(start, start + len(mark), token) for start, mark, token in marks]
    one = CompletionOutput(0, spelt + CALL, [1], None, "stop", added_token_spans=spans)
    events = form.answer_reader().read(RequestOutput("r", "a", [1], [one]), one).events
    assert [type(event) for event in events] == [Begun, Text, CallBegun, Arguments, CallEnded, Ended]
    assert events[1] == Text(spelt)


@pytest.mark.parametrize(
    ("text", "reason", "ends", "is_cut"),
    [
        (CALL, "stop", "calls", [False]),
        (CALL, "length", "length", [False]),
        (CALL[:-17], "length", "length", [True]),
        (CALL[:-17], "stop", "stop", [True]),
        (CALL[:-17], "abort", "abort", [True]),
        ("text", "stop", "stop", []),
    ],
)
def test_an_answer_ends_with_calls_only_if_none_is_cut(text, reason, ends, is_cut):
    for resumable in (False, True):
        events = events_of([text], reason, resumable=resumable)
        assert events[-1].reason == ends
        assert [event.is_cut for event in events if isinstance(event, CallEnded)] == is_cut


def test_the_end_has_the_tokens_and_what_stopped_it():
    assert events_of(["<think>", "a", "</think>", "b"], stop="END")[-1] == Ended("stop", "END", 3, 2, 4, 3)


def test_an_aborted_answer_that_may_go_on_holds_back_what_may_change():
    said = [event.text for event in events_of(["ab", "c\ufffd"], "abort", resumable=True) if isinstance(event, Text)]
    assert "".join(said) == "abc"
    assert together(events_of(["ab<thi"], "abort", resumable=True))[1:-1] == [Text("ab<thi")]
    assert together(events_of(["a<tool_"], "abort", resumable=True))[1:-1] == [Text("a")]
    assert together(events_of(["a<tool_"], "abort"))[1:-1] == [Text("a<tool_")]


def test_only_an_answer_that_no_server_could_go_on_with_has_failed():
    here = f"{RESTORED}has 9 outputs, above max_num_seqs=8"
    for why, resumable, failure in ((here, True, None), (here, False, here), ("no token fits", True, "no token fits")):
        assert events_of(["ab"], "abort", why, resumable=resumable)[-1].failure == failure
    assert together(events_of(["a<tool_"], "abort", here, resumable=True))[1:-1] == [Text("a")]
