"""Turns a step's samples into the arrays of the sampler."""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import Mesh

from jpaged.execution.mesh import replicate
from jpaged.execution.sampling.logit_edits import NO_ROW, LogitEdits, logit_edits, no_edits, pad_alike
from jpaged.execution.sampling.sampler import SamplingArrays
from jpaged.scheduling.step import Sample

RANKED = 8
"""Most likely tokens that every sampler but the plain one can give back; more compile another."""
_LEAST = float(np.finfo(np.float32).tiny)
"""Least temperature and top_p: below it float32 arithmetic has 0, logits divided by 0 and a nucleus of no token."""


def sampling_arrays(samples: list[Sample], width: int, vocab_size: int) -> SamplingArrays:
    """Return the settings of a step's samples, padded to `width` rows with greedy ones."""
    arrays = greedy_rows(width, vocab_size)
    for row, (request, seq, chunk) in enumerate(samples):
        params = request.params
        if params.temperature > 0:
            arrays.temperature[row] = max(params.temperature, _LEAST)
            arrays.top_p[row] = max(params.top_p, _LEAST)
            arrays.min_p[row] = params.min_p
            if params.top_k > 0:
                arrays.top_k[row] = min(params.top_k, vocab_size)
            seed = request.seed_of(seq)
            arrays.seed[row] = seed >> 32, seed & 0xFFFFFFFF
        arrays.position[row] = chunk.start + chunk.length
        arrays.ranked[row] = request.num_top > 0
    if any(request.edits_logits for request, _, _ in samples):
        return arrays._replace(edits=logit_edits(samples, width, vocab_size))
    return arrays


def of_one_shape(each: list[SamplingArrays]) -> list[SamplingArrays]:
    """Pad the arrays of several replicas until their lists of tokens and bans are as long as the longest."""
    if len(each) == 1:
        return each
    edits = pad_alike([arrays.edits for arrays in each])
    return [arrays._replace(edits=edit) for arrays, edit in zip(each, edits, strict=True)]


def all_plain(arrays: SamplingArrays) -> bool:
    """Tell whether every row takes the most likely token of its unedited logits, and no row asks for others."""
    edits = arrays.edits
    edited = edits.token_row[0] != NO_ROW or edits.ban_row[0] != NO_ROW or edits.masked.any()
    penalised = (edits.repetition != 1).any() or edits.presence.any() or edits.frequency.any()
    return not (arrays.temperature.any() or arrays.ranked.any() or edited or penalised)


def top_size(asked: int) -> int:
    """Return how many of the most likely tokens the sampler finds where `asked` are wanted."""
    return RANKED if asked <= RANKED else 1 << (asked - 1).bit_length()


def greedy_rows(width: int, vocab_size: int) -> SamplingArrays:
    """Return settings of `width` rows that take the most likely token."""
    return SamplingArrays(
        temperature=np.zeros(width, np.float32),
        top_k=np.full(width, vocab_size, np.int32),
        top_p=np.ones(width, np.float32),
        min_p=np.zeros(width, np.float32),
        seed=np.zeros((width, 2), np.uint32),
        position=np.zeros(width, np.int32),
        ranked=np.zeros(width, bool),
        edits=no_edits(width, vocab_size),
    )


class PlacedMasks:
    """Keeps the mask that lets all tokens pass, for each number of rows: most steps need no other."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._open: dict[int, jax.Array] = {}

    def put(self, args: SamplingArrays) -> SamplingArrays:
        """Return a step's sampling parameters, with its masks on the devices."""
        return args._replace(edits=args.edits._replace(mask=self._of(args.edits)))

    def clear(self) -> None:
        """Release the devices' memory."""
        self._open.clear()

    def _of(self, edits: LogitEdits) -> jax.Array:
        if edits.masked.any():
            return replicate(np.asarray(edits.mask), self._mesh)
        rows = edits.masked.shape[-1]
        if rows not in self._open:
            self._open[rows] = replicate(np.asarray(edits.mask), self._mesh)
        return self._open[rows]
