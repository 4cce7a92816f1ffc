"""A response's events go on behind those that were told before the server was killed, however the text is cut then."""

from __future__ import annotations

import itertools
import json

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jpaged.server.messages.parts import CallArguments, CallStart, Content, Reasoning
from jpaged.server.responses.answer import Items
from jpaged.server.responses.event_replay import EventReplay, ends, kind_of, without_false_ends
from jpaged.server.streaming import event

TEXT = st.text("ab\n\né", min_size=1, max_size=8)


@st.composite
def answers(draw):
    """What a model says: thoughts, a text, calls."""
    parts = [Reasoning(draw(TEXT))] * draw(st.integers(0, 1)) + [Content(draw(TEXT))] * draw(st.integers(0, 1))
    for number in range(draw(st.integers(0, 2))):
        parts += [CallStart(number, "f"), CallArguments(number, draw(TEXT))]
    return parts


def told_of(parts, *, last="completed", scored=False):
    """The events of some parts and of the end, each as it is when it is told; with `scored`, every character has a
    score, which is told as soon as its token is there: one ahead of the text."""
    items, events, scores = Items("r"), [("response.created", {}), ("response.in_progress", {})], 0
    for part in parts:
        if scored:
            ahead = sum(len(fields.get("delta", "")) for _, fields in events) + len(part.text) + 1
            items.scored(list(range(scores, ahead)))
            scores = ahead
        events += [(kind, json.loads(json.dumps(fields))) for kind, fields in items.add(part)]
    closed = [(kind, json.loads(json.dumps(fields))) for kind, fields in items.close(last)]
    return events, [*closed, (f"response.{last}", {})]


def written(events):
    return [event({"type": kind, "sequence_number": i, **fields}, kind) for i, (kind, fields) in enumerate(events)]


def read(events):
    return [(kind_of(one), json.loads(one.split(b"data: ", 1)[1])) for one in events if one is not None]


def joined(events):
    """Kinds of events with their text and scores, those of one text put together."""
    found = []
    for kind, fields in events:
        text, scores = fields.get("delta"), fields.get("logprobs", []) if "delta" in fields else []
        if text is not None and found and found[-1][0] == kind:
            found[-1] = kind, found[-1][1] + text, found[-1][2] + scores
        else:
            found.append((kind, text, scores))
    return found


def go_on(told, again):
    """All events of a response that was told so far when the server was killed, and was made again."""
    before = EventReplay(told)
    return [*read(told), *((kind, new) for kind, fields in again if (new := before.unseen(kind, fields)) is not None)]


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_what_was_told_and_what_is_new_make_the_whole_wherever_it_was_cut(data):
    parts = data.draw(answers())
    first, again = ([*begun, *end] for begun, end in (told_of(pieces(data, parts)) for _ in range(2)))
    told = written(first)[: data.draw(st.integers(0, len(first)))]
    assert joined(go_on(told, again)) == joined(again) == joined(first)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_every_score_is_told_once(data):
    parts = [Content(data.draw(TEXT))]
    first, again = ([*begun, *end] for begun, end in (told_of(pieces(data, parts), scored=True) for _ in range(2)))
    told = written(first)[: data.draw(st.integers(0, len(first)))]
    found = go_on(told, again)
    scores = [score for _, fields in found if "delta" in fields for score in fields["logprobs"]]
    assert scores == list(range(len(scores)))
    assert "".join(fields.get("delta", "") for _, fields in found) == parts[0].text
    assert len(scores) >= len(parts[0].text)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_an_end_that_was_none_is_told_no_more_and_keeps_its_numbers(data):
    parts = data.draw(answers())
    cut = pieces(data, parts)
    begun, end = told_of(cut[: data.draw(st.integers(0, len(cut)))], last="incomplete")
    told = written([*begun, *end])
    assert ends(told)
    left = without_false_ends(told, ended=False)
    assert len(left) == len(told) and left[: len(begun)] == told[: len(begun)] and not any(left[len(begun) :])
    again = [each for some in told_of(pieces(data, parts)) for each in some]
    assert joined(go_on(left, again)) == joined(again)
    assert without_false_ends(told, ended=True) == told


def test_where_another_answer_comes_all_of_it_is_told_from_there_on():
    told = written(told_of([Content("one")])[0])
    other = told_of([Reasoning("two"), Content("three")])[0]
    found = go_on(told, other)
    assert found[: len(told)] == read(told) and found[len(told) :] == other[2:]


def pieces(data, parts):
    """The parts with their texts cut anywhere."""
    found = []
    for part in parts:
        if isinstance(part, CallStart):
            found.append(part)
            continue
        cuts = data.draw(st.lists(st.integers(0, len(part.text)), max_size=4))
        bounds = sorted({0, len(part.text), *cuts})
        for a, b in itertools.pairwise(bounds):
            text = part.text[a:b]
            found.append(CallArguments(part.index, text) if isinstance(part, CallArguments) else type(part)(text))
    return found
