"""The grammar of a turn is made once, off the event loop, and again where anything that decides it differs."""

import asyncio
import threading

import pytest
from tiny_chat_model import byte_level_tokenizer
from turn_forms import form_of

from jpaged.answers.bound import BoundFormat
from jpaged.server.messages import turn_form
from jpaged.server.messages.kept_grammars import MOST_KEPT, MOST_KEPT_CHARACTERS, KeptGrammars
from jpaged.server.openai.bodies.chat import ChatRequest

NUMBER, TEXT = {"type": "integer"}, {"type": "string"}
TOKENIZER = byte_level_tokenizer()


def tool(**properties):
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


def test_the_formats_of_a_server_are_bound_to_its_tokenizer_once(server, monkeypatch):
    made = []
    monkeypatch.setattr(turn_form, "BoundFormat", lambda *given: made.append(given) or BoundFormat(*given))
    for _ in range(3):
        server.chat(max_tokens=1)
    assert len(made) == 1


class Counting(KeptGrammars):
    """Notes the threads that make grammars."""

    def __init__(self):
        super().__init__()
        self.threads = []

    def of(self, asked, make):
        return super().of(asked, lambda: (self.threads.append(threading.current_thread()), make())[1])


def test_a_grammar_is_made_once_in_a_thread_for_all_that_decides_it():
    grammars = Counting()

    def grammar_of(parser="hermes", prompt="hi", **asked):
        body = ChatRequest(messages=[{"role": "user", "content": "hi"}], **{"tools": [tool(a=NUMBER, b=TEXT)], **asked})
        turn = form_of(body, TOKENIZER, tool_parser=parser, reasoning_parser="think", grammars=grammars)
        turn.follow(prompt)
        return asyncio.run(turn.params_made_in_thread()).structured_outputs.grammar

    shape = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}
    cases = [
        {},
        {"parser": "qwen3_coder"},
        {"prompt": "hi<think>"},
        {"tools": [tool(b=TEXT, a=NUMBER)]},
        {"tool_choice": "required"},
        {"parallel_tool_calls": False},
        {"response_format": shape},
    ]
    made = [grammar_of(**case) for case in cases]
    assert len(set(made)) == len(grammars.threads) == len(cases)
    assert [grammar_of(**case) for case in cases] == made and len(grammars.threads) == len(cases)
    assert threading.main_thread() not in grammars.threads


@pytest.mark.parametrize(("size", "most"), [(1, MOST_KEPT), (2**20, MOST_KEPT_CHARACTERS // 2**20)])
def test_the_grammars_that_were_asked_for_last_are_kept(size, most):
    grammars = Counting()
    for i in (*range(most + 1), 1):  # the last one makes 1 newer than 2
        grammars.of(i, lambda: "a" * size)
    assert len(grammars.threads) == most + 1
    for i, count in ((most, 1), (1, 1), (0, 2), (2, 3)):
        grammars.of(i, lambda: "a" * size)
        assert len(grammars.threads) == most + count


def test_a_refusal_is_not_kept():
    grammars = KeptGrammars()
    with pytest.raises(ValueError, match="no such"):
        grammars.of([], lambda: (_ for _ in ()).throw(ValueError("no such")))
    assert grammars.of([], lambda: "a") == "a"
