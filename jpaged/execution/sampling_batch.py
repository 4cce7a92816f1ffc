"""From a step's samples to the arrays of the sampler."""

from __future__ import annotations

import numpy as np

from jpaged.execution.sampler import SamplingArrays
from jpaged.scheduling.step import Sample

EDITS_PER_SEQ = 4
RANKED = 8
"""Most likely tokens that every sampler but the plain one can give back; more compile another."""
NO_TOKEN = np.int32(2**31 - 1)


def sampling_arrays(samples: list[Sample], width: int, vocab_size: int) -> SamplingArrays:
    """Settings of a step's samples, padded to `width` rows with greedy ones."""
    arrays = greedy_rows(width, vocab_size)
    edits: list[tuple[int, int]] = []
    for row, (request, seq, chunk) in enumerate(samples):
        params = request.params
        if params.temperature > 0:
            arrays.temperature[row] = params.temperature
            arrays.top_p[row] = params.top_p
            arrays.min_p[row] = params.min_p
            if params.top_k > 0:
                arrays.top_k[row] = min(params.top_k, vocab_size)
            seed = request.seed_of(seq)
            arrays.seed[row] = seed >> 32, seed & 0xFFFFFFFF
        position = chunk.start + chunk.length
        arrays.position[row] = position
        arrays.ranked[row] = request.num_top > 0
        if position - seq.num_prompt < params.min_tokens:
            edits += [(row, token) for token in request.stop_ids]
    if edits:
        pairs = np.full((2, max(len(arrays.edit_row), _next_power(len(edits)))), NO_TOKEN, np.int32)
        pairs[:, : len(edits)] = np.array(edits, np.int32).T
        arrays = arrays._replace(edit_row=pairs[0], edit_token=pairs[1])
    return arrays


def all_plain(arrays: SamplingArrays) -> bool:
    """Whether every row takes the most likely token of its unedited logits, and nobody asks for others."""
    return not (arrays.temperature.any() or arrays.ranked.any() or (arrays.edit_row != NO_TOKEN).any())


def top_size(asked: int) -> int:
    """How many of the most likely tokens the sampler finds where `asked` are wanted."""
    return RANKED if asked <= RANKED else _next_power(asked)


def greedy_rows(width: int, vocab_size: int) -> SamplingArrays:
    """Sampling settings of `width` rows that take the most likely token."""
    edits = width * EDITS_PER_SEQ
    return SamplingArrays(
        temperature=np.zeros(width, np.float32),
        top_k=np.full(width, vocab_size, np.int32),
        top_p=np.ones(width, np.float32),
        min_p=np.zeros(width, np.float32),
        seed=np.zeros((width, 2), np.uint32),
        position=np.zeros(width, np.int32),
        ranked=np.zeros(width, bool),
        edit_row=np.full(edits, NO_TOKEN, np.int32),
        edit_token=np.full(edits, NO_TOKEN, np.int32),
    )


def _next_power(n: int) -> int:
    return 1 << (n - 1).bit_length()
