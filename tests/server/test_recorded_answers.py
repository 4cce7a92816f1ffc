"""The generating paths give the recorded answers, character for character, and ask the engine for the same."""

import asyncio
import json

from openai.types import Completion
from openai.types.chat import ChatCompletion
from openai.types.responses import Response
from pydantic import TypeAdapter, ValidationError
from recorded_answers import RECORD, all_answers

_TYPES = {"chat": TypeAdapter(ChatCompletion), "completion": TypeAdapter(Completion), "response": TypeAdapter(Response)}


def test_whole_answers_have_every_field_that_openais_client_needs():
    recorded = json.loads(RECORD.read_text())
    seen = {"chat": 0, "completion": 0, "response": 0}
    for name, answer in recorded.items():
        if (kind := name.split()[0]) not in seen or answer["status"] != 200:
            continue
        given = json.loads(answer["body"])
        given |= {"tools": [], "text": None} if kind == "response" else {}  # they are as the request has them
        try:
            _TYPES[kind].validate_python(given)
        except ValidationError as error:
            assert {each["type"] for each in error.errors()} == {"literal_error"}, (name, error)
            assert name.endswith("aborted")  # a server that ends has no word for it
        seen[kind] += 1
    assert min(seen.values()) > 2


def test_every_answer_is_the_recorded_one():
    recorded = json.loads(RECORD.read_text())
    found = json.loads(json.dumps(asyncio.run(all_answers())))
    assert found.keys() == recorded.keys()
    assert {name: answer for name, answer in found.items() if answer != recorded[name]} == {}
    assert len({answer["status"] for answer in found.values()}) > 6
