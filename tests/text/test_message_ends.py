"""The ends of a conversation's messages, in tokens of its prompt."""

from __future__ import annotations

import pytest
import tiny_chat_model

from jpaged.sampling_params import SamplingParams
from jpaged.text.input_processor import InputProcessor
from jpaged.text.prompt import Conversation, Tokenization, chat_prompt

SYSTEM = {"role": "system", "content": "be brief"}
LIMITS = {"vocab_size": 256, "max_model_len": 640, "max_num_seqs": 4, "eos_token_ids": (2,), "keeps_ends": True}


def talk(*contents: str, system: bool = True) -> list[dict[str, str]]:
    said = [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]
    return [SYSTEM, *said] if system else said


def prompt_of(messages):
    return chat_prompt(Conversation(messages), tiny_chat_model.tokenizer(), keeps_ends=True)


def texts(prompt) -> list[str]:
    tokenizer, ids = tiny_chat_model.tokenizer(), prompt["prompt_token_ids"]
    return [tokenizer.decode(ids[:end]) for end in prompt.get("prefix_ends", ())]


def test_messages_end_where_the_next_turn_a_new_question_and_another_conversation_begin():
    first = "<s>system: be brief<s>user: one<s>assistant: two"
    assert texts(prompt_of(talk("one", "two", "three"))) == [f"{first}<s>user: three", first, "<s>system: be brief"]
    assert texts(prompt_of(talk("one", system=False))) == ["<s>user: one"]


@pytest.mark.parametrize("number", range(1, 5))
def test_the_next_turn_begins_with_the_ids_up_to_the_last_messages_end(number):
    contents = [f"text {'abc' * i} {i}" for i in range(2 * number + 1)]
    now, later = prompt_of(talk(*contents[:-2])), prompt_of(talk(*contents))
    end = now["prefix_ends"][0]
    assert now["prompt_token_ids"][:end] == later["prompt_token_ids"][:end]


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages | length }}{% for m in messages %}<s>{{ m.content }}{% endfor %}",
        "{% for m in messages %}{% if loop.last %}<s>{% endif %}{{ m.content }}<s>{% endfor %}end",
        "{% for m in messages %}<s>{{ m.content }}{% endfor %}{% if messages[-1].role != 'user' %}{{ 1/0 }}{% endif %}",
    ],
)
def test_a_template_that_writes_earlier_messages_otherwise_has_no_such_end(template):
    tokenizer = tiny_chat_model.tokenizer()
    tokenizer.chat_template = template
    made = chat_prompt(Conversation(talk("one", "two", "three")), tokenizer, keeps_ends=True)
    ids = made["prompt_token_ids"]
    for end in made.get("prefix_ends", ()):
        shorter = tokenizer.decode(ids[:end])
        assert made["prompt"].startswith(shorter) and len(ids) >= end
    assert len(made.get("prefix_ends", ())) < 3


def test_a_token_over_the_end_of_a_message_leaves_it_out():
    tokenizer = tiny_chat_model.tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    made = chat_prompt(Conversation(talk("a", "bcd", system=False)), tokenizer, keeps_ends=True)
    assert made["prefix_ends"] == [len(made["prompt_token_ids"])], "'ab' is one token"


def test_a_request_counts_ends_in_the_tokens_that_are_left_of_it():
    inputs = InputProcessor(tiny_chat_model.tokenizer(), **LIMITS)
    whole = inputs.process(Conversation(talk("one", "two", "three")), SamplingParams())
    assert len(whole.prefix_ends) == 3
    cut = 4
    for options in ({"tokenization": Tokenization(max_length=len(whole.prompt_token_ids) - cut)}, {}):
        most = None if options else len(whole.prompt_token_ids) - cut
        params = SamplingParams(truncate_prompt_tokens=most)
        short = inputs.process(Conversation(talk("one", "two", "three")), params, **options)
        assert set(short.prefix_ends) <= {end - cut for end in whole.prefix_ends if end > cut}
        assert short.prefix_ends[0] == whole.prefix_ends[0] - cut
    ids = list(range(3, 40))
    given = inputs.process({"prompt_token_ids": ids, "prefix_ends": [30, 8]}, SamplingParams(truncate_prompt_tokens=20))
    assert given.prefix_ends == (13,)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({"prompt_token_ids": [3, 4], "prefix_ends": [3]}, r"prefix_ends=\[3\] ends after the prompt's 2 tokens"),
        ({"prompt_token_ids": [3, 4], "prefix_ends": [0]}, "prefix_ends=0"),
        ({"prompt_token_ids": [3, 4], "prefix_ends": 1}, "prefix_ends=1 must be a list"),
        ({"prompt_token_ids": [3, 4], "prefix_ends": [1.5]}, "prefix_ends"),
        ({"prompt": "abc", "prefix_ends": [1]}, "give prompt_token_ids with it"),
    ],
)
def test_ends_that_are_no_lengths_of_the_prompt_are_refused(prompt, message):
    with pytest.raises((ValueError, TypeError), match=message):
        InputProcessor(tiny_chat_model.tokenizer(), **LIMITS).process(prompt, SamplingParams())
