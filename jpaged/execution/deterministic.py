"""Runs deterministic steps: programs of few shapes compute every token, so a batch never changes a result.

A product's bits depend on the shapes it is computed with, and attention's on how the keys are cut. Here a step runs
as launches of `ROWS` tokens, each token a separate decode: the rows of a launch are independent of each other, and
the keys of a token are always cut at the same positions. So a token's hidden state depends on its sequence only, not
on chunks, neighbours, preemption or prefix hits.

Tokens of an image that see each other need each layer's K and V of them all. They are a launch of their own, always
the whole image and nothing else, so that what it computes depends on the sequence only, too. Where images have any
size, it has one of few lengths.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from jpaged.execution.batch import BY_TOKEN, StepBatch, single_tokens
from jpaged.execution.caches.base import LayerCache
from jpaged.execution.compile.buckets import Bucket

ROWS = 64
"""Tokens of a launch."""

BUCKET = Bucket(ROWS, ROWS, decode_only=True)


class Launch(NamedTuple):
    """Holds a part of a step.

    Attributes:
        batch: its arrays, of the shape of `bucket`.
        here: which of the step's samples start from one of its tokens.
        rows: the step's rows that it computes.
    """

    batch: StepBatch
    bucket: Bucket
    here: Bool[np.ndarray, " max_seqs"]
    rows: range


def image_bucket(length: int) -> Bucket:
    """Return the bucket of a launch of an image whose tokens see each other."""
    return Bucket(length, 1, decode_only=False, images=True)


def padded_bucket(num_tokens: int, max_num_seqs: int, *, images: bool = False) -> Bucket:
    """Return the bucket of a whole step that `launches` can cut; where there may be images it has a row to spare."""
    return Bucket(-(-(num_tokens + images) // ROWS) * ROWS, max_num_seqs, decode_only=False, images=images)


def empty_launch(batch: StepBatch, caches: Sequence[LayerCache]) -> StepBatch:
    """Return a launch of padding only.

    Args:
        batch: a batch of padding only, of `BUCKET`, with or without images.

    Raises:
        ValueError: layers cannot be computed token by token; the message names their group.
    """
    rows, seqs = slice(0, ROWS), np.zeros(ROWS, np.int32)
    arrays = (cache.one_by_one(own, rows, seqs) for cache, own in zip(caches, batch.caches, strict=True))
    return batch._replace(caches=tuple(arrays))


def launches(
    batch: StepBatch,
    num_samples: int,
    caches: Sequence[LayerCache],
    *,
    images: bool = False,
    together: Sequence[int] = (),
) -> Iterator[Launch]:
    """Cut a step into launches, in order: a later one reads the KV that an earlier one wrote.

    Args:
        caches: those of the layer groups, in the batch's order.
        images: whether the batch has places for images.
        together: lengths of launches of an image whose tokens see each other, ascending.
    """
    num_tokens = int(batch.query_starts[-1])
    seq = np.repeat(np.arange(len(batch.kv_lens)), np.diff(batch.query_starts))
    seq = np.pad(seq, (0, len(batch.tokens) - num_tokens))
    sampled = np.arange(len(batch.sample_at)) < num_samples
    start = 0
    for image in [*_whole_images(batch, caches), range(num_tokens, num_tokens)]:
        for first in range(start, image.start, ROWS):
            rows = range(first, min(first + ROWS, image.start))
            arrays = _one_by_one(batch, rows, seq, caches, num_tokens)
            yield _launch(batch, arrays, replace(BUCKET, images=images), rows, sampled)
        if image:
            length = next((each for each in together if each >= len(image)), len(image))
            arrays = _together(batch, image, seq[image.start], caches, length, num_tokens)
            yield _launch(batch, arrays, image_bucket(length), image, sampled)
        start = image.stop


def _launch(batch: StepBatch, part: StepBatch, bucket: Bucket, rows: range, sampled: np.ndarray) -> Launch:
    here = sampled & (batch.sample_at >= rows.start) & (batch.sample_at < rows.stop)
    at = np.where(here, batch.sample_at - rows.start, 0).astype(np.int32)
    return Launch(part._replace(sample_at=at), bucket, here, rows)


def _one_by_one(
    batch: StepBatch, rows: range, seq: Int[np.ndarray, " tokens"], caches: Sequence[LayerCache], num_tokens: int
) -> StepBatch:
    """Return the arrays of some tokens, each as a separate sequence."""
    stop = rows.start + ROWS
    here: slice | np.ndarray = slice(rows.start, stop)
    if stop > len(batch.tokens) or rows.stop < min(stop, num_tokens):
        # Later rows belong to another launch, or to none: a row of padding stands for them.
        here = np.append(rows, np.full(ROWS - len(rows), num_tokens))
    arrays = (cache.one_by_one(own, here, seq[here]) for cache, own in zip(caches, batch.caches, strict=True))
    return single_tokens(_by_token(batch, here), len(rows), tuple(arrays), batch.sample_at)


def _together(
    batch: StepBatch, rows: range, seq: int, caches: Sequence[LayerCache], length: int, num_tokens: int
) -> StepBatch:
    """Return the arrays of an image's tokens, and padding up to `length`."""
    here: slice | np.ndarray = slice(rows.start, rows.stop)
    if length > len(rows):  # a row of padding stands for those that are missing
        here = np.append(rows, np.full(length - len(rows), num_tokens))
    return StepBatch(
        **_by_token(batch, here),
        query_starts=np.array([0, len(rows)], np.int32),
        kv_lens=batch.positions[rows.stop - 1 : rows.stop] + 1,
        caches=tuple(cache.together(arrays, here, seq) for cache, arrays in zip(caches, batch.caches, strict=True)),
        sample_at=batch.sample_at,
    )


def _by_token(batch: StepBatch, rows: slice | np.ndarray) -> dict[str, np.ndarray]:
    return {name: getattr(batch, name)[rows] for name in BY_TOKEN}


def _whole_images(batch: StepBatch, caches: Sequence[LayerCache]) -> list[range]:
    """Return the rows of images whose tokens see each other."""
    found = (cache.last_seen(arrays) for cache, arrays in zip(caches, batch.caches, strict=True))
    last = next((one for one in found if one is not None), None)
    images: list[range] = []
    if last is None:
        return images
    for row in np.flatnonzero(last > batch.positions).tolist():
        if not images or row >= images[-1].stop:
            images.append(range(row, row + int(last[row] - batch.positions[row]) + 1))
    return images
