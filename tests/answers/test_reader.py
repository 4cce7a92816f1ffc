"""A reader looks at each character a bounded number of times, whatever the pieces of the text."""

import json

import pytest
import regex

from jpaged.answers.bound import BoundFormat
from jpaged.answers.notations import Json, Literals, Tagged
from jpaged.answers.rows import ANSWER_FORMATS

N = 6000
LISTED = json.dumps([1] * (N // 3))
CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
WORDS = "ab " * (N // 3)
TEXTS = {
    "an array between tags": (
        "qwen3_coder",
        "none",
        f"<tool_call>\n<function=f>\n<parameter=a>\n{LISTED}\n</parameter>",
    ),
    "a string between tags": (
        "qwen3_coder",
        "none",
        f"<tool_call>\n<function=f>\n<parameter=s>\n{WORDS}\n</parameter>",
    ),
    "a number of JSON": ("hermes", "none", '<tool_call>\n{"name": "f", "arguments": {"a": 0.' + "3" * N + "}}"),
    "a number of Python": ("pythonic", "none", "[f(a=0." + "3" * N + ")]"),
    "a string of Python": ("pythonic", "none", "[f(s='" + "a\\n" * (N // 3) + "')]"),
    "a name without quotes": ("gemma4", "none", "<|tool_call>call:f{" + "a" * N + ":1}<tool_call|>"),
    "a thought that quotes a call": ("hermes", "runs", f"so {CALL} {WORDS}</think>yes"),
    "a thought with half a call": ("hermes", "runs", f'so <tool_call>\n{{"name": "f{WORDS}</think>yes'),
    "white space before text": ("hermes", "may", "\n" * N + "yes"),
    "white space in marked text": ("granite3", "none", "<response>" + (" " * 99 + "a") * (N // 100) + "</response>"),
    "white space after a call": ("hermes", "none", f"{CALL}a{' ' * N}b"),
    "an id after the arguments": ("mistral", "none", '[TOOL_CALLS][{"name": "f", "arguments": {}, "id": "' + "a" * N),
    "calls": ("hermes", "none", CALL * (N // len(CALL))),
    "marks without calls": ("hermes", "none", "<tool_call> x " * (N // 14)),
}
FUNCTIONS = [{"name": "f", "parameters": {"type": "object", "properties": {"a": {}, "s": {"type": "string"}}}}]


class Counted:
    """A pattern that counts the characters that it may look at."""

    def __init__(self, pattern, seen):
        self._pattern, self._seen = pattern, seen

    def match(self, text, at=0, end=None, **options):
        end = len(text) if end is None else end
        self._seen.append(end - at)
        return self._pattern.match(text, at, end, **options)

    def search(self, text, at=0, end=None, **options):
        end = len(text) if end is None else end
        found = self._pattern.search(text, at, end, **options)
        self._seen.append((end if found is None else found.end()) - at)
        return found

    def fullmatch(self, text):
        return self._pattern.fullmatch(text)


class CountedReader:
    """A reader of arguments; counts the characters that it has read, and those that it wants to be given again."""

    def __init__(self, reader, seen):
        self._reader, self._seen = reader, seen

    def push(self, held, at):
        text, end, state = self._reader.push(held, at)
        self._seen.append((len(held) if state == "more" else end) - at)
        return text, end, state


@pytest.mark.parametrize("size", [4, N * 2])
@pytest.mark.parametrize("name", TEXTS)
def test_no_text_is_read_again_and_again(monkeypatch, name, size):
    family, thought, text = TEXTS[name]
    seen, plain = [], regex.compile
    monkeypatch.setattr(regex, "compile", lambda *given: Counted(plain(*given), seen))
    for kind in (Json, Literals, Tagged):

        def counted(own, *given, made=kind.reader):
            return CountedReader(made(own, *given), seen)

        monkeypatch.setattr(kind, "reader", counted)
    reader = BoundFormat(ANSWER_FORMATS[family]).reader(thought=thought, functions=FUNCTIONS)
    parts = [part for at in range(0, len(text), size) for part in reader.push(text[at : at + size])]
    parts += reader.finish()
    assert sum(seen) < 80 * len(text)
    assert parts, "nothing was read"


@pytest.mark.parametrize("family", ANSWER_FORMATS)
def test_no_pattern_tries_a_run_of_white_space_in_more_than_one_way(monkeypatch, family):
    made, plain = [], regex.compile
    monkeypatch.setattr(regex, "compile", lambda pattern, *given: made.append(pattern) or plain(pattern, *given))
    reader = BoundFormat(ANSWER_FORMATS[family]).reader()
    patterns = reader._patterns
    sought = (patterns.call_begin, patterns.thought_end, patterns.amid_text, patterns.amid_marked_text)
    _ = patterns.text_begin, patterns.thought_begin, patterns.skipped, patterns.shaped_begin
    twice = r"\\s\*(?:\(\?:)*\\s\*"
    assert [one for one in made if regex.search(twice, one)] == []
    bare = r"(?:^|[|(]|\(\?:|\(\?P<\w+>)\\s\*"
    assert [one.pattern for one in sought if one is not None and regex.search(bare, one.pattern)] == []
