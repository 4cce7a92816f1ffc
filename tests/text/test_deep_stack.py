"""What recurses deeply is called with a stack that takes it."""

import threading

import pytest

from jpaged.text.grammar import STACK_BYTES, with_deep_stack


def test_a_call_has_its_stack_and_others_keep_theirs(monkeypatch):
    sizes = []
    before, start = threading.stack_size(), threading.Thread.start
    monkeypatch.setattr(
        threading.Thread, "start", lambda thread: (sizes.append(threading.stack_size()), start(thread))[1]
    )
    assert with_deep_stack(lambda: threading.current_thread().name) == "jpaged-deep-stack"
    assert sizes == [STACK_BYTES] and threading.stack_size() == before


def test_what_a_call_raises_is_raised():
    def fail():
        raise ValueError("no grammar")

    with pytest.raises(ValueError, match="no grammar"):
        with_deep_stack(fail)
