"""The generating paths give the recorded answers, character for character, and ask the engine for the same."""

import asyncio
import json

from recorded_answers import RECORD, all_answers


def test_every_answer_is_the_recorded_one():
    recorded = json.loads(RECORD.read_text())
    found = json.loads(json.dumps(asyncio.run(all_answers())))
    assert found.keys() == recorded.keys()
    assert {name: answer for name, answer in found.items() if answer != recorded[name]} == {}
    assert len({answer["status"] for answer in found.values()}) > 6
