"""An item says which features its tokens take, and refuses what it has not."""

from __future__ import annotations

import numpy as np
import pytest

from jpaged.scheduling.inputs import PromptItem


def item(length, features, takes=None, **more):
    return PromptItem(10, length, b"", features, {}, False, takes=None if takes is None else np.array(takes), **more)


def test_tokens_take_the_features_in_order_unless_it_says_otherwise():
    assert item(4, 4).taken(11, 13).tolist() == [1, 2]
    rows = item(6, 4, [0, 1, -1, 2, 3, -1])  # two rows of patches, each with a token that ends it
    assert rows.taken(11, 15).tolist() == [1, -1, 2, 3]


def test_features_are_consumed_once_no_later_token_takes_them():
    assert [item(4, 4).consumed(10 + n) for n in range(5)] == [0, 1, 2, 3, 4]
    rows = item(6, 4, [0, 1, -1, 2, 3, -1])
    assert [rows.consumed(10 + n) for n in range(7)] == [0, 1, 2, 2, 3, 4, 4]
    again = item(4, 2, [1, 0, -1, 0])  # a feature that several tokens take
    assert [again.consumed(10 + n) for n in range(5)] == [0, 0, 0, 0, 2]


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="takes are those of 3 tokens, and the item has 4"):
        item(4, 4, [0, 1, 2])
    with pytest.raises(ValueError, match=r"takes=0\.\.4 are not among the item's 4 features"):
        item(4, 4, [0, 1, 2, 4])
    with pytest.raises(ValueError, match="offsets are those of 3 tokens"):
        item(4, 4, offsets=np.zeros((3, 3), int))
