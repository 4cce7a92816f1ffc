"""Messages arrive as they were sent, and carry nothing but data."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from jpaged.execution.batch import StepBatch
from jpaged.execution.caches.attention import AttentionBatch
from jpaged.execution.caches.prompt_budget import PromptBudgetBatch
from jpaged.execution.compile.buckets import Bucket
from jpaged.execution.packing import packed
from jpaged.execution.sampling.sampling_batch import blank_rows
from jpaged.execution.wire import decode, encode

ARRAYS = npst.arrays(
    st.sampled_from([np.int32, np.uint32, np.float32, np.bool_]), npst.array_shapes(min_dims=0, min_side=0)
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.text() | ARRAYS,
    lambda inner: st.lists(inner).map(tuple),
)


def equal(a, b) -> bool:
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    return type(a) is type(b) and a == b


@given(st.text(), st.lists(VALUES).map(tuple))
def test_what_is_sent_arrives(name, args):
    got_name, got = decode(encode(name, args))
    assert got_name == name and equal(args, got)


def test_a_step_arrives_as_what_the_worker_takes():
    ints = np.arange(4, dtype=np.int32)
    caches = AttentionBatch(ints.reshape(2, 2), ints[::2]), PromptBudgetBatch(ints[None], ints[None], ints[None], ints)
    batch = StepBatch(ints, ints, ints, ints, ints, caches, ints[::-1])
    sent = (batch, Bucket(4, 2, True), 3), (blank_rows(4, 100), 8), ("swap_out", [ints], [ints[:0]])
    names = [decode(encode("call", args))[1] for args in sent]
    assert all(map(equal, names[:2], sent[:2]))
    assert equal(decode(encode("call", (packed(batch),)))[1], (batch,)), "other processes pack it for themselves"
    kind, (dropped,), (moves,) = names[2]
    assert kind == "swap_out" and dropped.tolist() == ints.tolist() and moves.shape == (0,)


def test_an_array_of_one_value_takes_the_room_of_one():
    """Masks of a batch without structured outputs would be megabytes a step."""
    mask = np.broadcast_to(np.int32(-1), (256, 5000))
    message = encode("draw", (mask,))
    assert len(message) < 100
    (got,) = decode(message)[1]
    assert equal(mask, got)


@pytest.mark.parametrize("value", [object(), b"bytes", {"a": 1}, np.float32(1)])
def test_other_kinds_are_refused(value):
    with pytest.raises(TypeError, match=f"{type(value).__name__} cannot be sent"):
        encode("call", ((value,),))


def test_a_message_without_a_header_is_refused():
    with pytest.raises(ValueError, match="3 bytes without a header"):
        decode(b"abc")
