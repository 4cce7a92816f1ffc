"""The rows of chunks of one token are those that chunks of any length get."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jpaged.execution import Bucket
from jpaged.execution.token_rows import TokenRows, token_rows
from jpaged.scheduling import Chunk, ScheduledStep, Sequence

decodes = st.lists(st.tuples(st.integers(0, 9), st.integers(-1, 3), st.booleans()), min_size=1, max_size=6)


def chunk(row: int, start: int, length: int, source_row: int, is_draft: bool = False) -> Chunk:
    """A chunk of a sequence whose last token is on the device where `source_row` says where, or a draft."""
    source_row, drafts = (-1, (7,)) if is_draft else (source_row, ())
    known = start + length - (source_row >= 0) - len(drafts)
    tokens = [100 * row + i for i in range(known)]
    return Chunk(Sequence(row, 0, tokens, known, row=row), start, length, source_row, None, drafts)


@given(decodes, st.integers(0, 3), st.integers(0, 3))
def test_decodes_alone_have_the_rows_that_they_have_before_a_prompt(found, more_tokens, more_seqs):
    chunks = [chunk(5 - row, start, 1, *rest) for row, (start, *rest) in enumerate(found)]
    number = len(chunks)
    alone = token_rows(ScheduledStep(chunks), Bucket(number + more_tokens, number + more_seqs, True))
    mixed = token_rows(ScheduledStep([*chunks, chunk(6, 0, 3, -1)]), Bucket(number + 3, number + 1, False))
    for field in TokenRows._fields:
        first = number + (field == "query_starts")
        one, other = getattr(alone, field), getattr(mixed, field)
        assert one[:first].tolist() == other[:first].tolist() and one.dtype == other.dtype, field
    assert alone.query_starts[number:].tolist() == [number] * (more_seqs + 1)
    assert not alone.kv_lens[number:].any() and not alone.positions[number:].any() and not alone.tokens[number:].any()
    assert (alone.source_rows[number:] == -1).all()


def test_batches_cannot_write_to_what_they_share():
    rows = token_rows(ScheduledStep([chunk(0, 3, 1, 0)]), Bucket(2, 2, True))
    again = token_rows(ScheduledStep([chunk(1, 7, 1, 0)]), Bucket(2, 2, True))
    assert again.query_starts is rows.query_starts and not rows.query_starts.flags.writeable
    assert not np.shares_memory(rows.positions, again.positions)
