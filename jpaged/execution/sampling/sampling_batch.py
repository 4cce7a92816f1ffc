"""Turns a step's samples into the arrays of the sampler."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from functools import cache
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Int

from jpaged.execution.mesh import HostOrDevice, num_replicas, replicate, stack
from jpaged.execution.sampling.edit import NO_ROW, PIECE, Edit
from jpaged.execution.sampling.pair_tables import PairTables
from jpaged.execution.sampling.registry import EDITS
from jpaged.execution.sampling.sampler import SamplingArrays
from jpaged.scheduling.request import Request, Sequence
from jpaged.scheduling.step import Sample, ScheduledStep

RANKED = 8
"""Most likely tokens that every sampler but the plain one can give back; more compile another."""


class SamplerRows:
    """Makes the arrays of a sampler's rows, step by step.

    Arrays that depend on the rows' requests and sequences alone are kept until rows change: the same objects come back,
    so that the devices can keep theirs, see `PlacedRows`.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._of: tuple[int, list[Sequence]] = 0, []
        self._ranked = np.zeros(0, bool)
        self._asking: dict[Edit[Any], list[int]] = {}
        self._kept: dict[Edit[Any], Any] = {}

    def arrays(self, step: ScheduledStep, width: int) -> SamplingArrays:
        """Return the settings of a step's samples, padded to `width` rows with greedy ones."""
        others = step.other_samples
        rows = width, [*step.decodes.seqs, *(seq for _, seq, _ in others)] if others else step.decodes.seqs
        if rows != self._of:
            self._of, self._kept = rows, {}
            requests = [*step.decodes.requests, *(request for request, _, _ in others)]
            ranked, self._asking = _asked(requests, width)
            if not np.array_equal(ranked, self._ranked):  # else the devices have it, as none asks in most steps
                self._ranked = ranked
        position, number = np.zeros(width, np.int32), step.decodes.number
        np.add(step.decodes.starts, 1, out=position[:number])
        if others:
            ends = [chunk.start + chunk.length for _, _, chunk in others]
            position[number : number + len(ends)] = ends
        return SamplingArrays(position, self._ranked, tuple(self._filled(edit, step, width) for edit in EDITS))

    def _filled(self, edit: Edit[Any], step: ScheduledStep, width: int) -> Any:
        if edit not in self._asking:
            return None
        if edit in self._kept:
            return self._kept[edit]
        arrays = edit.fill(self._asking[edit], step.samples, _blank(edit, width, self._vocab_size))
        if edit.by_sequence:
            self._kept[edit] = arrays
        return arrays


def sampling_arrays(samples: Seq[Sample], width: int, vocab_size: int) -> SamplingArrays:
    """Return the settings of a step's samples, see `SamplerRows`, where no other step is known."""
    return SamplerRows(vocab_size).arrays(ScheduledStep(other_samples=[*samples]), width)


def _asked(requests: Seq[Request], width: int) -> tuple[np.ndarray, dict[Edit[Any], list[int]]]:
    """Return which rows ask for the most likely tokens, and which rows ask for each edit."""
    ranked = np.zeros(width, bool)
    asking: dict[Edit[Any], list[int]] = {}
    for row, request in enumerate(requests):
        if request.num_top:
            ranked[row] = True
        edits = request.edits
        if edits is None:  # it asks for the same as long as it lives
            edits = request.edits = tuple(edit for edit in EDITS if edit.asks(request))
        for edit in edits:
            asking.setdefault(edit, []).append(row)
    return ranked, asking


def of_all(mesh: Mesh, each: Seq[SamplingArrays], vocab_size: int) -> SamplingArrays:
    """Return the arrays of all replicas, as the worker takes them.

    Where a row of any replica fills an edit's arrays, those of the others are blank, and all list as many pairs.
    """
    if len(each) == 1:
        return stack(mesh, each)
    edits = [
        _of_one_size(edit, arrays, _blank(edit, each[0].position.shape[0], vocab_size))
        for edit, arrays in zip(EDITS, zip(*(arrays.edits for arrays in each), strict=True), strict=True)
    ]
    return stack(mesh, [arrays._replace(edits=own) for arrays, own in zip(each, zip(*edits, strict=True), strict=True)])


def _of_one_size(edit: Edit[Any], each: tuple[Any, ...], blank: Any) -> tuple[Any, ...]:
    if all(arrays is None for arrays in each):
        return each
    whole = [blank if arrays is None else arrays for arrays in each]
    if not edit.pairs:
        return tuple(whole)
    size = max(map(edit.num_pairs, whole))
    return tuple(arrays if edit.num_pairs(arrays) == size else edit.resized(arrays, blank, size) for arrays in whole)


def with_room(sizes: Seq[int], arrays: Callable[[int], SamplingArrays]) -> SamplingArrays:
    """Return the arrays of a draw for the fewest rows whose lists have room for all pairs; for the most rows, which
    alone take tables, if none have.

    Args:
        sizes: numbers of rows that hold the draw, from the fewest on.
        arrays: makes the arrays for a number of rows.
    """
    args = arrays(sizes[0])
    if not args.tabled or len(sizes) == 1:
        return args
    most = arrays(sizes[-1])
    return most if most.tabled else next(args for args in map(arrays, sizes[1:]) if not args.tabled)


def top_size(asked: int) -> int:
    """Return how many of the most likely tokens the sampler finds where `asked` are wanted."""
    return RANKED if asked <= RANKED else 1 << (asked - 1).bit_length()


def blank_rows(width: int, vocab_size: int) -> SamplingArrays:
    """Return arrays of `width` rows that take the most likely token, in the form that programs are compiled for: with
    blank ones of each edit, and lists of pairs."""
    edits = tuple(_blank(edit, width, vocab_size) for edit in EDITS)
    return SamplingArrays(np.zeros(width, np.int32), np.zeros(width, bool), edits)


@cache
def _blank(edit: Edit[Any], width: int, vocab_size: int) -> Any:
    """Return the blank arrays of an edit; they cannot be changed, as all steps share them."""
    blank = edit.blank(width, vocab_size)
    for array in jax.tree.leaves(blank):
        array.flags.writeable = False
    return blank


def in_pieces(args: SamplingArrays, mesh: Mesh, vocab_size: int) -> Iterator[SamplingArrays]:
    """Yield the arrays of all replicas with `PIECE` pairs in each list: the first ones, then the next, to the last. At
    least one is yielded."""
    blanks = [_blank(edit, args.position.shape[-1], vocab_size) for edit in EDITS]
    whole = [
        stack(mesh, [blank] * num_replicas(mesh)) if edit.pairs and arrays is None else arrays
        for edit, arrays, blank in zip(EDITS, args.edits, blanks, strict=True)
    ]
    lists = [getattr(arrays, edit.pairs[0]) for edit, arrays in zip(EDITS, whole, strict=True) if edit.pairs]
    longest = max(int((rows != NO_ROW).sum(axis=-1).max()) for rows in lists)  # without padding
    for start in range(0, max(1, longest), PIECE):
        yield args._replace(
            edits=tuple(
                edit.resized(arrays, blank, PIECE, start) if edit.pairs else arrays
                for edit, arrays, blank in zip(EDITS, whole, blanks, strict=True)
            )
        )


class PlacedRows:
    """Keeps the sampler's arrays on the devices: those of edits that no row asks for, for each number of rows, as most
    steps need them, and those that were placed last, which `SamplerRows` may ask for again.

    Args:
        tables: writes lists of pairs that are too long for the sampler.
    """

    def __init__(self, mesh: Mesh, vocab_size: int, tables: PairTables) -> None:
        self._mesh = mesh
        self._vocab_size = vocab_size
        self._tables = tables
        self._blanks: dict[int, tuple[Any, ...]] = {}
        self._placed: dict[int, tuple[Any, Any]] = {}  # by field: as they lie on the host, and on the devices

    def put(self, args: SamplingArrays, last_tokens: Int[HostOrDevice, "*replicas max_seqs"]) -> SamplingArrays:
        """Return a step's sampling parameters, with all arrays on the devices but the positions.

        Args:
            last_tokens: what the step before drew.
        """
        if not args.tabled:
            return self._put_all(args)
        return self._tables.of(map(self._put_all, in_pieces(args, self._mesh, self._vocab_size)), last_tokens)

    def _put_all(self, args: SamplingArrays) -> SamplingArrays:
        blanks = self._of(args.position.shape[-1])
        edits = (
            blank if arrays is None else self._put(number, arrays, blank)
            for number, (arrays, blank) in enumerate(zip(args.edits, blanks, strict=True))
        )
        return args._replace(ranked=self._put(len(blanks), args.ranked), edits=tuple(edits))

    def _put(self, field: int, arrays: Any, blank: Any = None) -> Any:
        """Return the arrays of a field on the devices, where blank ones of its edit lie already."""
        on_host, placed = self._placed.get(field, (None, None))
        if on_host is not arrays:
            # Placed like the blank ones: a program takes arrays that lie as those did that it was compiled for.
            placed = replicate(arrays, self._mesh) if blank is None else self._with_blanks(arrays, blank)
            self._placed[field] = arrays, placed
        return placed

    def _with_blanks(self, arrays: Any, blank: Any) -> Any:
        """Place arrays without those that repeat one value, as only blank ones do, see `_blank`."""
        leaves, tree = jax.tree.flatten(arrays)
        own = [leaf for leaf in leaves if not _repeats(leaf)]
        placed = iter(replicate(own, self._mesh))
        there = jax.tree.leaves(blank)
        return jax.tree.unflatten(
            tree, [old if _repeats(leaf) else next(placed) for leaf, old in zip(leaves, there, strict=True)]
        )

    def clear(self) -> None:
        """Release the devices' memory."""
        self._tables.forget()
        self._blanks.clear()
        self._placed.clear()

    def _of(self, rows: int) -> tuple[Any, ...]:
        if rows not in self._blanks:
            each = blank_rows(rows, self._vocab_size).edits
            self._blanks[rows] = replicate(stack(self._mesh, [each] * num_replicas(self._mesh)), self._mesh)
        return self._blanks[rows]


def _repeats(array: np.ndarray) -> bool:
    return array.size > 1 and not any(array.strides)
