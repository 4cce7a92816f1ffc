"""An answer of a chat is given as a message too, whatever of its marks the text shows and however it comes."""

from __future__ import annotations

import json

import pytest
from renderings import TEMPLATES, rendered, tokenizer_with

from jpaged import CompletionOutput, RequestOutput, RequestOutputKind, SamplingParams, StructuredOutputsParams
from jpaged.answers.rows import ANSWER_FORMATS
from jpaged.outputs import AnswerMessage, ToolCall
from jpaged.text.chat_answers import ChatAnswers, ChatReader
from jpaged.text.chat_template import ChatOptions
from jpaged.text.detokenizer import IncrementalDecoder
from jpaged.text.prompt import Conversation

TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}]
CALL = ("look_up", {"city": "Rome", "days": 3})
USER = [{"role": "user", "content": "hello"}]
MODELS = {}


def model(family):
    if family not in MODELS:
        tokenizer = tokenizer_with(family)
        MODELS[family] = tokenizer, ChatAnswers(tokenizer)
    return MODELS[family]


def outputs(family, text, *, size=None, skip=True):
    """Return an answer as an engine gives it: whole, or in deltas of some tokens."""
    tokenizer, _ = model(family)
    ids = tokenizer.encode(text, add_special_tokens=False)
    decoder, made, told = IncrementalDecoder(tokenizer, skip_special_tokens=skip), [], 0
    for at in range(0, len(ids), size or len(ids)):
        new = ids[at : at + (size or len(ids))]
        piece, ends = "".join(map(decoder.push, new)), at + len(new) == len(ids)
        piece += decoder.finish() if ends else ""
        spans = [one._replace(start=one.start - told, end=one.end - told) for one in decoder.spans if one.end >= told]
        spans, decoder.spans, told = spans, [], told + len(piece)
        made.append(CompletionOutput(0, piece, new, None, "stop" if ends else None, added_token_spans=spans))
    return [RequestOutput("r", "[user]hello[assistant]", [1], [one]) for one in made]


def message_of(family, text, *, size=None, skip=True, options=None, **params):
    kind = RequestOutputKind.DELTA if size else RequestOutputKind.FINAL_ONLY
    conversation = Conversation(USER, options or ChatOptions(tools=TOOLS))
    reader = ChatReader(model(family)[1], conversation, SamplingParams(output_kind=kind, **params))
    read = [reader.read(output).outputs[0].message for output in outputs(family, text, size=size, skip=skip)]
    assert read[:-1] == [None] * (len(read) - 1)
    return read[-1]


def test_a_named_format_of_thoughts_comes_before_the_one_that_the_template_renders():
    tokenizer = tokenizer_with("hermes")
    conversation = Conversation(USER, ChatOptions(tools=TOOLS))
    for named, thought in ((None, None), ("seed_oss", "so it is")):
        reader = ChatAnswers(tokenizer, named).reader(conversation, SamplingParams(), None)
        reader.push("<seed:think>so it is</seed:think>Rome")
        assert reader.finish().reasoning == thought
    with pytest.raises(ValueError, match="reasoning_parser='other' is not one of think, "):
        ChatAnswers(tokenizer, "other")


def test_formats_of_callers_templates_are_not_kept_without_a_bound():
    tokenizer = tokenizer_with("hermes")
    chats = ChatAnswers(tokenizer)
    for number in range(40):
        options = ChatOptions(chat_template=f"{{# {number} #}}{tokenizer.chat_template}")
        chats.reader(Conversation(USER, options), SamplingParams(), None)
    assert 0 < len(chats._forms) <= 16


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("size", [None, 1, 5])
@pytest.mark.parametrize("family", ["hermes", "gpt_oss", "mistral_args", "gemma4", "kimi_k2", "deepseek_v31", "think"])
def test_the_message_has_thought_text_and_calls(family, size, skip):
    form = ANSWER_FORMATS[family]
    calls, thought = [CALL] if form.calls else [], "so it is" if form.thought else None
    made = message_of(family, rendered(family, thought, "I look.", *calls), size=size, skip=skip)
    assert (made.content.strip(), made.reasoning) == ("I look.", thought)
    assert [(one.name, json.loads(one.arguments)) for one in made.tool_calls] == calls
    assert all(one.id for one in made.tool_calls)


def test_a_message_is_the_next_of_its_conversation():
    tokenizer, _ = model("hermes")
    made = message_of("hermes", rendered("hermes", None, None, CALL))
    assert made.content is None and made.to_dict()["tool_calls"][0]["function"]["name"] == "look_up"
    again = AnswerMessage("so", "hm", [ToolCall("1", "f", "{}")]).to_dict()
    assert again["reasoning_content"] == "hm" and again["content"] == "so"
    assert "<tool_call>" in tokenizer.apply_chat_template([*USER, made.to_dict()], tokenize=False)


def test_a_call_is_text_without_tools_and_a_cut_one_is_left_out():
    text = rendered("hermes", None, None, CALL)
    assert message_of("hermes", text, skip=False, options=ChatOptions()) == AnswerMessage(text)
    cut = message_of("hermes", text[:-20])
    assert cut.tool_calls == [] and "<tool_call>" not in (cut.content or "")


def test_a_shape_is_no_call_and_a_text_that_is_not_decoded_no_message():
    shaped = StructuredOutputsParams(json={"type": "object"})
    text = '{"a": "<tool_call>"}'
    assert message_of("hermes", text, structured_outputs=shaped) == AnswerMessage(text)
    assert message_of("hermes", text, detokenize=False) is None


def test_the_format_is_that_of_the_template_which_is_given():
    other = tokenizer_with("nemotron").chat_template
    text = rendered("nemotron", None, None, CALL)
    made = message_of("hermes", text, options=ChatOptions(tools=TOOLS, chat_template=other))
    assert [one.name for one in made.tool_calls] == ["look_up"]
    assert TEMPLATES["nemotron"] in other or "TOOLCALL" in other


def test_a_model_without_a_template_has_plain_messages():
    chats = ChatAnswers(None)
    reader = ChatReader(chats, Conversation(USER), SamplingParams())
    one = CompletionOutput(0, "text", [1], None, "stop")
    assert reader.read(RequestOutput("r", None, [1], [one])).outputs[0].message == AnswerMessage("text")
