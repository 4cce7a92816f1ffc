"""A response's events continue after those sent before a restart, however the text is cut then."""

from __future__ import annotations

import itertools
import json

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jpaged.server.openai.responses.answer import Items
from jpaged.server.openai.responses.event_replay import EventReplay, ends, kind_of, without_false_ends
from jpaged.server.streaming import event
from jpaged.server.turn import Arguments, CallBegun, Text, Thought

TEXT = st.text("ab\n\né", min_size=1, max_size=8)


@st.composite
def answers(draw):
    """Return the parts of a model's answer: thoughts, a text, calls."""
    parts = [Thought(draw(TEXT))] * draw(st.integers(0, 1)) + [Text(draw(TEXT))] * draw(st.integers(0, 1))
    for number in range(draw(st.integers(0, 2))):
        parts += [CallBegun(number, "f"), Arguments(number, draw(TEXT))]
    return parts


def events_of(parts, *, last="completed", scored=False):
    """The events of some parts and of the end; with `scored`, every character has a score, which comes with its
    token: one ahead of the text."""
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


def go_on(sent, again):
    """All events of a response that was sent so far before a restart and is generated again."""
    before = EventReplay(sent)
    return [*read(sent), *((kind, new) for kind, fields in again if (new := before.unseen(kind, fields)) is not None)]


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_sent_and_new_events_make_the_whole_wherever_it_was_cut(data):
    parts = data.draw(answers())
    first, again = ([*begun, *end] for begun, end in (events_of(pieces(data, parts)) for _ in range(2)))
    sent = written(first)[: data.draw(st.integers(0, len(first)))]
    assert joined(go_on(sent, again)) == joined(again) == joined(first)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_every_score_is_sent_once(data):
    parts = [Text(data.draw(TEXT))]
    first, again = ([*begun, *end] for begun, end in (events_of(pieces(data, parts), scored=True) for _ in range(2)))
    sent = written(first)[: data.draw(st.integers(0, len(first)))]
    found = go_on(sent, again)
    scores = [score for _, fields in found if "delta" in fields for score in fields["logprobs"]]
    assert scores == list(range(len(scores)))
    assert "".join(fields.get("delta", "") for _, fields in found) == parts[0].text
    assert len(scores) >= len(parts[0].text)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_a_false_end_is_dropped_and_numbers_stay(data):
    parts = data.draw(answers())
    cut = pieces(data, parts)
    begun, end = events_of(cut[: data.draw(st.integers(0, len(cut)))], last="incomplete")
    sent = written([*begun, *end])
    assert ends(sent)
    left = without_false_ends(sent, ended=False)
    assert len(left) == len(sent) and left[: len(begun)] == sent[: len(begun)] and not any(left[len(begun) :])
    again = [each for some in events_of(pieces(data, parts)) for each in some]
    assert joined(go_on(left, again)) == joined(again)
    assert without_false_ends(sent, ended=True) == sent


def test_another_answer_is_new_from_the_first_difference_on():
    sent = written(events_of([Text("one")])[0])
    other = events_of([Thought("two"), Text("three")])[0]
    found = go_on(sent, other)
    assert found[: len(sent)] == read(sent) and found[len(sent) :] == other[2:]


def pieces(data, parts):
    """The parts with their texts cut anywhere."""
    found = []
    for part in parts:
        if isinstance(part, CallBegun):
            found.append(part)
            continue
        cuts = data.draw(st.lists(st.integers(0, len(part.text)), max_size=4))
        bounds = sorted({0, len(part.text), *cuts})
        for a, b in itertools.pairwise(bounds):
            text = part.text[a:b]
            found.append(Arguments(part.index, text) if isinstance(part, Arguments) else type(part)(text))
    return found
