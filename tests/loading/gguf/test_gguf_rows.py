"""Lazy rows of a GGUF file, cut into heads."""

from itertools import islice

import numpy as np
import pytest

from jpaged.loading.gguf.rows import GGUFRows

VALUES = np.arange(48, dtype=np.float32).reshape(12, 4)
ROWS = GGUFRows(VALUES, lambda part: part, 1, 1, VALUES.dtype, range(12), range(4))


def test_a_loop_over_heads_ends_with_the_last_one():
    heads = list(islice(ROWS.reshape(3, 4, 4), 10))  # bounded: a loop without end would take all memory
    assert len(heads) == 3
    np.testing.assert_array_equal(np.stack([np.asarray(head) for head in heads]), VALUES.reshape(3, 4, 4))


@pytest.mark.parametrize("head", [3, -1])
def test_a_head_that_is_not_there_is_refused(head):
    with pytest.raises(IndexError, match=f"head {head} of 3"):
        ROWS.reshape(3, 4, 4)[head]
