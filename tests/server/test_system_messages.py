"""Messages of the system stay where a template shows them, and become the user's where it does not."""

import pytest

from jpaged.server.messages.system_messages import SystemMessages


def of(role, content="x"):
    return {"role": role, "content": content}


def render_all(messages, **options):
    return {"prompt": "|".join(f"{one['role']}:{one['content']}" for one in messages)}


def render_first(messages, **options):
    """As Llama 2's: later messages of the system are dropped."""
    return render_all([one for i, one in enumerate(messages) if i == 0 or one["role"] != "system"])


def render_none(messages, **options):
    """As Gemma's: one of the system is refused, and roles alternate."""
    if any(one["role"] == "system" for one in messages):
        raise ValueError("System role not supported")
    return render_all(messages)


FIRST, ASK, SAY, AMID, MORE = (
    of("system", "be"),
    of("user", "a"),
    of("assistant", "b"),
    of("system", "now"),
    of("user", [{"type": "text", "text": "c"}]),
)
BOTH = of("user", [{"type": "text", "text": "now"}, {"type": "text", "text": "c"}])


@pytest.mark.parametrize(
    ("render", "want"),
    [
        (render_all, [FIRST, ASK, SAY, AMID, MORE]),
        (render_first, [FIRST, ASK, SAY, BOTH]),
        (render_none, [of("user", "be\n\na"), SAY, BOTH]),
    ],
)
def test_each_stays_or_joins_the_users(render, want):
    assert SystemMessages().placed([FIRST, ASK, SAY, AMID, MORE], render) == want


def test_the_neighbour_is_after_it_before_it_or_both():
    for messages, want in (
        ([ASK, AMID, of("user", "d")], [of("user", "a\n\nnow\n\nd")]),
        ([ASK, AMID], [of("user", "a\n\nnow")]),
        ([ASK, SAY, AMID, SAY], [ASK, SAY, of("user", "now"), SAY]),
        ([ASK, SAY, of("tool"), AMID], [ASK, SAY, of("tool"), of("user", "now")]),
        ([ASK, AMID, AMID, SAY], [of("user", "a\n\nnow\n\nnow"), SAY]),
    ):
        assert SystemMessages().placed(messages, render_none) == want
        assert SystemMessages().placed(messages, render_first) == want


def test_a_template_is_asked_once_and_only_if_there_is_one():
    asked = []

    def render(messages, **options):
        asked.append(messages)
        return render_all(messages)

    places = SystemMessages()
    assert places.placed([ASK, SAY], render) == [ASK, SAY] and not asked
    for _ in range(3):
        places.placed([FIRST, ASK], render)
    assert len(asked) == 2
