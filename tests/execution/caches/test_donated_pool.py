"""The pool from its making to its end."""

import numpy as np
import pytest

from jpaged.execution import make_mesh, plan_pool
from jpaged.execution.caches.pool import DonatedPool
from jpaged.model_api import AttentionGroup


@pytest.fixture
def spec():
    return plan_pool(
        (AttentionGroup("full", (0,), 1, 8),), block_size=4, dtype=np.dtype("float32"), shards=1, pool_bytes=1 << 14
    )


def test_it_is_made_once_and_holds_what_replaces_it(spec):
    held = DonatedPool(spec, make_mesh(1))
    made = held.array
    assert held.array is made and not np.asarray(made).any()
    held.array = made + 1
    assert np.asarray(held.array).all()


def test_its_memory_is_given_back_whether_or_not_anybody_asked_for_it_or_a_call_took_it(spec):
    unasked, taken = DonatedPool(spec, make_mesh(1)), DonatedPool(spec, make_mesh(1))
    unasked.delete()
    assert unasked.array.is_deleted()
    taken.array.delete()
    taken.delete()


def test_one_that_could_not_be_made_says_so_and_has_nothing_to_give_back(spec, monkeypatch):
    def no_room(*_):
        raise MemoryError("no room")

    monkeypatch.setattr("jpaged.execution.caches.pool.make_pool", no_room)
    held = DonatedPool(spec, make_mesh(1))
    held.delete()
    with pytest.raises(MemoryError, match="no room"):
        held.array  # noqa: B018
