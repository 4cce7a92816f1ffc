"""Turns a step's samples into the arrays of the sampler."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from jax.sharding import Mesh

from jpaged.execution.mesh import num_replicas, replicate, stack
from jpaged.execution.sampling.edit import Edit
from jpaged.execution.sampling.registry import EDITS
from jpaged.execution.sampling.sampler import SamplingArrays
from jpaged.scheduling.step import Sample

RANKED = 8
"""Most likely tokens that every sampler but the plain one can give back; more compile another."""


def sampling_arrays(samples: Sequence[Sample], width: int, vocab_size: int) -> SamplingArrays:
    """Return the settings of a step's samples, padded to `width` rows with greedy ones."""
    position, ranked = np.zeros(width, np.int32), np.zeros(width, bool)
    asking: defaultdict[Edit[Any], list[int]] = defaultdict(list)
    for row, (request, _, chunk) in enumerate(samples):
        position[row] = chunk.start + chunk.length
        if request.num_top:
            ranked[row] = True
        edits = request.edits
        if edits is None:  # it asks for the same as long as it lives
            edits = request.edits = tuple(edit for edit in EDITS if edit.asks(request))
        for edit in edits:
            asking[edit].append(row)
    return SamplingArrays(
        position=position,
        ranked=ranked,
        edits=tuple(
            edit.fill(asking[edit], samples, _blank(edit, width, vocab_size)) if edit in asking else None
            for edit in EDITS
        ),
    )


def of_all(mesh: Mesh, each: Sequence[SamplingArrays], vocab_size: int) -> SamplingArrays:
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
    size = max(number for arrays in whole for number in edit.num_pairs(arrays))
    return tuple(edit.lengthened(arrays, blank, size) for arrays in whole)


def top_size(asked: int) -> int:
    """Return how many of the most likely tokens the sampler finds where `asked` are wanted."""
    return RANKED if asked <= RANKED else 1 << (asked - 1).bit_length()


def blank_rows(width: int, vocab_size: int) -> SamplingArrays:
    """Return arrays of `width` rows that take the most likely token, in the form that programs are compiled for: with
    blank ones of each edit."""
    edits = tuple(_blank(edit, width, vocab_size) for edit in EDITS)
    return SamplingArrays(np.zeros(width, np.int32), np.zeros(width, bool), edits)


@cache
def _blank(edit: Edit[Any], width: int, vocab_size: int) -> Any:
    """Return the blank arrays of an edit; they cannot be changed, as all steps share them."""
    blank = edit.blank(width, vocab_size)
    for array in blank:
        array.flags.writeable = False
    return blank


class PlacedBlanks:
    """Keeps the arrays of edits that no row asks for on the devices, for each number of rows: most steps need them."""

    def __init__(self, mesh: Mesh, vocab_size: int) -> None:
        self._mesh = mesh
        self._vocab_size = vocab_size
        self._blanks: dict[int, tuple[Any, ...]] = {}

    def put(self, args: SamplingArrays) -> SamplingArrays:
        """Return a step's sampling parameters, with the arrays of all edits on the devices."""
        blanks = self._of(args.position.shape[-1])
        if not any(arrays is not None for arrays in args.edits):
            return args._replace(edits=blanks)
        # Placed like the blank ones: a program takes arrays that lie as those did that it was compiled for.
        filled = replicate(args.edits, self._mesh)
        edits = zip(filled, blanks, strict=True)
        return args._replace(edits=tuple(blank if arrays is None else arrays for arrays, blank in edits))

    def clear(self) -> None:
        """Release the devices' memory."""
        self._blanks.clear()

    def _of(self, rows: int) -> tuple[Any, ...]:
        if rows not in self._blanks:
            each = blank_rows(rows, self._vocab_size).edits
            self._blanks[rows] = replicate(stack(self._mesh, [each] * num_replicas(self._mesh)), self._mesh)
        return self._blanks[rows]
