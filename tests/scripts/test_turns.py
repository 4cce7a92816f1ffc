"""What a turn of a conversation computes: its new tokens and at most a block, if the template keeps earlier turns."""

import pytest

from scripts.benchmarks.turns import BLOCK, Turns, Words, conversation, turns

KEEPS = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}<s>{{ m.role }}: "
    "{% if m.thinking %}<think>{{ m.thinking }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<call>{{ c.function | tojson }}</call>{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)
DROPS = (
    "{% set last = namespace(user=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set last.user = loop.index %}"
)
DROPS += "{% endif %}{% endfor %}" + KEEPS.replace(
    "{% if m.thinking", "{% if (keep or loop.index > last.user) and m.thinking"
)
INTERVAL = 256


@pytest.mark.parametrize("interval", [0, INTERVAL])
def test_a_conversation_that_only_grows_computes_its_new_tokens_and_at_most_a_block(interval):
    found = Turns(Words(KEEPS), interval).run(conversation(9, calls=True), calls=True)
    most = BLOCK + (INTERVAL // 8 if interval else 0)  # recurrent layers: since the last checkpoint of the answer
    assert len(found) == 9 and found[-1]["prompt"] > 1200
    for turn in found[1:]:
        assert 0 < turn["new"] <= turn["computed"] <= turn["new"] + most
        assert turn["cached"] + turn["computed"] == turn["prompt"]


def test_a_template_that_drops_thoughts_computes_all_after_the_last_user_anew():
    found = Turns(Words(DROPS)).run(conversation(6, calls=True), calls=True)
    grown = [turn["new"] >= 0 for turn in found[1:]]
    assert grown == [True, True, False, True, True]
    assert found[3]["computed"] > 2 * found[2]["computed"]
    kept = Turns(Words(DROPS), 0, {"keep": True}).run(conversation(6, calls=True), calls=True)
    assert all(turn["new"] >= 0 for turn in kept[1:])


def test_the_table_has_a_row_for_the_variable_that_keeps_thoughts(tmp_path):
    (tmp_path / "drops.jinja").write_text(DROPS)
    (tmp_path / "keeps.jinja").write_text(KEEPS)
    (tmp_path / "refuses.jinja").write_text("{{ raise_exception('never') }}")
    rows = turns(templates=tmp_path)
    assert [row["template"] for row in rows] == ["drops", "drops keep=True", "keeps"]
    assert [row["only new"] for row in rows] == ["4 of 5", "5 of 5", "5 of 5"]
