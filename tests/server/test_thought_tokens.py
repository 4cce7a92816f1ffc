"""The tokens of a thought are counted, however its text and its tokens come."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_chat_model import byte_level_tokenizer

from jpaged.answers.bound import BoundFormat, format_of
from jpaged.answers.thought_tokens import ThoughtTokens

THINK = BoundFormat(format_of(None, "think"))
TOKENIZER = byte_level_tokenizer()
CHAT = "/v1/chat/completions"
END = 150
"""A token that stands for the mark of a thought's end, where the tokenizer has one."""


def texts_of(ids):
    """The text that each token adds."""
    lengths = [len(decode(ids[:count])) for count in range(len(ids) + 1)]
    return [decode(ids)[start:stop] for start, stop in itertools.pairwise(lengths)]


def decode(ids):
    return "".join("</think>" if one == END else TOKENIZER.decode([one]) for one in ids)


def encode(text):
    return TOKENIZER.encode(text, add_special_tokens=False)


CASES = {  # the output, whether the prompt began a thought, and what the thought is
    "<think>so it is</think>yes": (False, "<think>so it is</think>"),
    "  <think>so</think>": (False, "  <think>so</think>"),
    "<think>so it": (False, "<think>so it"),
    "so it is</think>yes": (True, "so it is</think>"),
    "</think>yes": (True, "</think>"),
    "so it": (True, "so it"),
    "yes <think>so</think>": (False, ""),
    "<thi": (False, ""),
    "": (False, ""),
}


@pytest.mark.parametrize("text", CASES)
@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=20), one_token=st.booleans())
def test_the_tokens_up_to_the_end_of_the_thought_count(text, sizes, one_token):
    inside, thought = CASES[text]
    ids, end = encode(text), None
    count = next((n for n in range(len(ids) + 1) if len(decode(ids[:n])) >= len(thought)), None)
    if one_token and "</think>" in text:
        before, after = text.split("</think>")
        ids, end = [*encode(before), END, *encode(after)], END
        count = len(encode(before)) + 1 if thought else 0
    reader = THINK.reader(thought="runs" if inside else "may")
    counter, at, pieces = ThoughtTokens(reader, end, decode), 0, texts_of(ids)
    for size in itertools.cycle(sizes):
        piece = "".join(pieces[at : at + size])
        reader.push(piece)
        counter.add(ids[at : at + size], piece)
        at += size
        if at >= len(ids):
            break
    reader.finish()
    assert counter.total == count


def test_text_that_lags_behind_its_tokens_does_not_move_a_thoughts_end():
    reader = THINK.reader(thought="runs")
    counter = ThoughtTokens(reader, END, decode)
    for ids, piece in (([5, 6], ""), ([END], "ab"), ([7, 8, 9], "</think>"), ([10], "yes")):
        reader.push(piece)
        counter.add(ids, piece)
    assert counter.total == 3


def begun(ids, text):
    """Return how many of the tokens have a text."""
    return next(n for n in range(len(ids) + 1) if text in TOKENIZER.decode(ids[:n]))


def test_the_usage_of_a_chat_tells_them_whole_and_streamed(serve):
    server = serve(reasoning_parser="think")
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 60, "return_token_ids": True, "seed": 3}
    body |= {"structured_outputs": {"regex": "<think>[a-p ]{24}</think>yes"}, "n": 2}
    whole = server.answer(CHAT, body)
    want = sum(begun(choice["token_ids"], "</think>") for choice in whole["choices"])
    assert 0 < want < whole["usage"]["completion_tokens"]
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": want}
    options = {"include_usage": True, "continuous_usage_stats": True}
    told = [chunk["usage"] for chunk in server.chunks(CHAT, body | {"stream_options": options})]
    assert told[-1]["completion_tokens_details"] == {"reasoning_tokens": want}
    details = [one["completion_tokens_details"] for one in told if "completion_tokens_details" in one]
    counts = [one["reasoning_tokens"] for one in details]
    assert counts == sorted(counts) and len(set(counts)) > 3
    hidden = server.answer(CHAT, body | {"include_reasoning": False})
    assert hidden["usage"]["completion_tokens_details"] == {"reasoning_tokens": want}


def test_the_usage_of_a_response_tells_them(serve, tiny_llm, monkeypatch):
    template = tiny_llm.tokenizer.chat_template + "{% if add_generation_prompt %}<think>{% endif %}"
    body = {"model": "tiny", "input": "hi", "max_output_tokens": 12, "seed": 3, "ignore_eos": True}
    server = serve(reasoning_parser="think")
    assert server.answer("/v1/responses", body)["usage"]["output_tokens_details"] == {"reasoning_tokens": 0}
    monkeypatch.setattr(tiny_llm.tokenizer, "chat_template", template)
    response = server.answer("/v1/responses", body)
    assert [item["type"] for item in response["output"]] == ["reasoning"]
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": 12}


def test_without_a_reasoning_parser_nothing_is_told_of_thoughts(server):
    assert "completion_tokens_details" not in server.chat()["usage"]
