"""Defines an edit of logits or a truncation for the engine: an `Edit` owns the use of some parameters of a request.

An edit is one file with one `Edit`, and a line in `jpaged.execution.sampling.registry`. Its host half says which fields
of `SamplingParams` it reads, which requests ask for it, and how the rows that do fill arrays; its device half is the
operation on logits or weights. Everything else goes through this interface: padding, replicas, programs, messages to
other processes, step dumps, and the choice of the sampler without edits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jpaged.execution.mesh import HostOrDevice, most_of_replicas
from jpaged.scheduling.request import Request
from jpaged.scheduling.step import Sample

NO_ROW = np.int32(2**31 - 1)
"""A row that no batch has; what is written to it is dropped."""

PIECE = 8192
"""Pairs of a row and a token that are written into a table at once, see `Edit.spread`."""
TURN = 1024
"""Pairs that the sampler takes from its lists at once, see `Edit.in_turns`."""

A = TypeVar("A", bound=tuple[Any, ...])
C = TypeVar("C")
Table = dict[str, Array]
"""Has a value for each token of each row, [seqs, vocab], by the name of the column of pairs that it stands for."""


class Edit(ABC, Generic[A]):
    """An edit of logits or a truncation of what can be drawn. It has no state: all of a row's is in its arrays.

    Attributes:
        fields: the fields of `SamplingParams` that are its own: each field that is part of "edit" is one edit's. It
            may read others too.
        arrays: a NamedTuple of its arrays, by a name that no other edit's have. An array has a row for each row of the
            sampler, or it is one of `pairs`, or a tuple of arrays. One that repeats a single value (`np.broadcast_to`)
            must be a blank one: it does not travel.
        pairs: names of the arrays that list pairs of a row and a token, all of one length: the rows, the tokens, and
            columns of values.
        by_sequence: whether a row's values depend on its request and sequence alone, not on its tokens: arrays are
            then kept until rows change.
        room_of_row, room: pairs for which the sampler's lists have room, for each of its rows, and at most; multiples
            of `TURN`. Where any edit of a draw has more, those of all are written into tables first, see `spread`:
            their number is no part of a program's shape.
    """

    fields: ClassVar[tuple[str, ...]]
    arrays: ClassVar[type[Any]]
    pairs: ClassVar[tuple[str, ...]] = ()
    room_of_row: ClassVar[int] = 0
    room: ClassVar[int] = 0
    by_sequence: ClassVar[bool] = False

    @abstractmethod
    def asks(self, request: Request) -> bool:
        """Tell whether a row of this request may ever be filled; always the same of one request."""

    @abstractmethod
    def blank(self, width: int, vocab_size: int) -> A:
        """Return arrays of `width` rows that change nothing. Rows and pairs that are filled up repeat their values."""

    @abstractmethod
    def fill(self, rows: Sequence[int], samples: Sequence[Sample], blank: A) -> A | None:
        """Return the arrays of a step; None where they would change nothing, as after the last of min_tokens.

        Args:
            rows: the rows that ask.
            samples: all rows of the step, by number.
            blank: see `blank`; it cannot be written to.
        """

    def edit(
        self, logits: Float[Array, "seqs vocab"], arrays: A, last_tokens: Int[Array, " max_seqs"]
    ) -> Float[Array, "seqs vocab"]:
        """Return the edited logits, on the device; one with `pairs` takes tables too, see `with_table` and `as_wide`.

        Args:
            last_tokens: what the step before drew, see `newest`.
        """
        return logits

    def truncate(self, weights: Float[Array, "seqs vocab"], arrays: A) -> Float[Array, "seqs vocab"]:
        """Return weights with 0 for the tokens that cannot be drawn, on the device; the most likely one weighs 1."""
        return weights

    # ------------------------------------------------------------ lists of pairs

    def listed(self, width: int) -> int:
        """Return for how many pairs the lists of a sampler of `width` rows have room."""
        return min(self.room_of_row * width, self.room)

    def num_pairs(self, arrays: A) -> int:
        """Return how long the lists of pairs are, on the host, of one replica or several."""
        return getattr(arrays, self.pairs[0]).shape[-1] if self.pairs else 0

    def tabled(self, arrays: A | None, width: int) -> bool:
        """Tell whether the pairs are, or go, into a table, as there are more than the lists of `width` rows hold."""
        if arrays is None or not self.pairs:
            return False
        return getattr(arrays, self.pairs[0]) is None or self.num_pairs(arrays) > self.listed(width)

    def filled(self, arrays: A, blank: A, **columns: np.ndarray) -> A:
        """Return the arrays with these lists of pairs, all of one length, and padding."""
        number, room = len(next(iter(columns.values()))), self.num_pairs(blank)
        return self.resized(_with(arrays, columns), blank, room if number <= room else -(-number // PIECE) * PIECE)

    def in_turns(self, turn: Callable[[C, A], C], carry: C, arrays: A) -> C:
        """Call `turn` with the lists of pairs, `TURN` of them at a time, as far as any replica has some, on the device.

        Args:
            turn: called with what it returned last, at first `carry`, and the arrays with some pairs.
        """
        lists = [jnp.asarray(getattr(arrays, name)) for name in self.pairs]
        number, size = most_of_replicas(jnp.sum(lists[0] != NO_ROW)), min(TURN, len(lists[0]))

        def take(i: Array, carry: C) -> C:
            some = (lax.dynamic_slice_in_dim(of, i * size, size) for of in lists)
            return turn(carry, _with(arrays, dict(zip(self.pairs, some, strict=True))))

        return lax.fori_loop(0, -(-number // size), take, carry)

    def resized(self, arrays: A, blank: A, size: int, start: int = 0) -> A:
        """Return the arrays with `size` pairs of one replica or several, those from `start` on and padding."""
        columns = {}
        for name in self.pairs:
            nothing, values = getattr(blank, name), getattr(arrays, name)[..., start : start + size]
            columns[name] = np.full((*values.shape[:-1], size), nothing.flat[0], nothing.dtype)
            columns[name][..., : values.shape[-1]] = values
        return _with(arrays, columns)

    def table(self, seqs: int, vocab_size: int) -> Table:
        """Return the table of no pairs, on the device."""
        blank = self.blank(1, vocab_size)
        of_each = {name: getattr(blank, name) for name in self.pairs[2:]}
        return {name: jnp.full((seqs, vocab_size), of.flat[0], of.dtype) for name, of in of_each.items()}

    def spread(self, table: Table, arrays: A, last_tokens: Int[Array, " max_seqs"]) -> Table:
        """Return the table with the pairs of `arrays` too, on the device: here each pair occurs once at most."""
        row, token, *columns = (getattr(arrays, name) for name in self.pairs)
        values = zip(self.pairs[2:], columns, strict=True)
        return {name: table[name].at[row, token].set(column, mode="drop") for name, column in values}

    def with_table(self, arrays: A, table: Table) -> A:
        """Return the arrays with a table for lists of pairs: rows and tokens are None."""
        return _with(arrays, dict.fromkeys(self.pairs) | table)


def as_wide(table: Array, logits: Float[Array, "seqs vocab"]) -> Array:
    """Return a table with as many columns as logits have, zeros for those that several devices need beyond the
    vocabulary."""
    return jnp.pad(table, ((0, 0), (0, logits.shape[1] - table.shape[1])))


def _with(arrays: Any, some: Mapping[str, Any]) -> Any:
    """Return the NamedTuple with some of its arrays replaced."""
    return arrays._replace(**some)


def with_rows(blank: HostOrDevice, rows: Sequence[int], values: Iterable[Any]) -> np.ndarray:
    """Return a copy of a blank array with values in some of its rows."""
    array = np.array(blank)
    for row, value in zip(rows, values, strict=True):
        array[row] = value
    return array


# ---------------------------------------------------------------- the newest token


def history_of(sample: Sample) -> list[int]:
    """Return the tokens of a row that the host knows, from the prompt on, with the drafts that it comes after."""
    _, seq, chunk = sample
    return [*seq.token_ids, *chunk.drafts] if chunk.drafts else seq.token_ids


def pending_row(sample: Sample, history: list[int]) -> int:
    """Return where in the last step's samples the row's newest token lies; -1 = `history` has it.

    The token drawn in the step before may not have reached the host when a step's arrays are made. It is read on the
    device, and counted, compared and penalised as if the host had known it.
    """
    chunk = sample.chunk
    return chunk.source_row if chunk.start + chunk.length > len(history) else -1


def newest(pending: Int[HostOrDevice, " seqs"], last_tokens: Int[Array, " max_seqs"]) -> Int[Array, " seqs"]:
    """Return each row's newest token by `pending_row`; -1 where the host knew it."""
    return jnp.where(pending >= 0, last_tokens[jnp.maximum(pending, 0)], -1)


def of_row(values: HostOrDevice, row: HostOrDevice) -> Array:
    """Return each pair's value of its row; that of the last row where it has none."""
    return jnp.asarray(values)[jnp.minimum(row, len(values) - 1)]
