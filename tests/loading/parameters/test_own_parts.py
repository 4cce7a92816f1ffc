"""A process reads what its own devices hold: the bytes that are sliced out of a checkpoint's files are counted."""

from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
from checkpoints import make_checkpoint
from dense_model import abstract
from transformers import AutoConfig

from jpaged.loading.parameters.placement import own_parts
from jpaged.loading.parameters.targets import targets_of
from jpaged.loading.safetensors_reader import SafetensorsWeights
from jpaged.model_api import TENSOR_AXIS

SHARDS = 4
OWN = (2, 3)
"""Shards of the second of two processes."""


class Counted(np.ndarray):
    """Counts the bytes of slices that are taken of it or of its views while `counting` is on."""

    bytes_read = None

    def __getitem__(self, index):
        part = super().__getitem__(index)
        if Counted.bytes_read is not None:
            Counted.bytes_read += part.nbytes
        return part


@contextmanager
def counting():
    Counted.bytes_read = 0
    try:
        yield
    finally:
        Counted.bytes_read = None


def views(array):
    """The NumPy arrays that slices of a converted tensor are taken of."""
    if isinstance(array, np.ndarray):
        yield array
    else:
        for piece in array.pieces:
            yield from views(piece)


def is_read_when_sliced(array, stored):
    """It lies in a tensor's own memory, or is zeros; numbers of heads are few and may be copied."""
    of_file = any(np.may_share_memory(array, tensor) for tensor in stored)
    return of_file or array.ndim == 1 or not any(array.strides)


def indices(partition, shape):
    """Return each shard's part of a parameter."""
    for shard in range(SHARDS):
        borders = [(shard * size // SHARDS, (shard + 1) * size // SHARDS) for size in shape]
        yield tuple(
            slice(*border) if axis == TENSOR_AXIS else slice(None)
            for axis, border in zip(partition, borders, strict=True)
        )


def holding(partition, shards):
    """A sharding of which this process has some shards."""

    def of_devices(shape):
        every = list(indices(partition, shape))
        return {shard: every[shard] for shard in shards}

    return SimpleNamespace(addressable_devices_indices_map=of_devices)


@pytest.mark.parametrize(
    ("name", "options"),
    [(name, {}) for name in ("llama", "llama-tied-biased", "opt", "ministral-shared-kv", "gpt_oss", "llama4")]
    + [(name, {"expert_parallel": True}) for name in ("gpt_oss", "llama4")],
)
def test_no_more_is_read_than_the_devices_hold_and_it_is_the_right_part(name, options, tmp_path):
    changes = {"num_local_experts": 2 * SHARDS} if options else {}
    make_checkpoint(name, tmp_path, **changes)
    reader = SafetensorsWeights(tmp_path)
    all_read = all_stored = 0
    config = AutoConfig.from_pretrained(tmp_path)
    for target in targets_of(abstract(config, tensor_parallel=SHARDS, **options)):
        source = target.source
        stored = [reader.read(tensor) for tensor in source.sources]
        array = source.convert(*(tensor.view(Counted) for tensor in stored))
        assert all(is_read_when_sliced(view, stored) for view in views(array)), target.name
        with counting():
            parts = own_parts(array, array.dtype, holding(source.partition, OWN))
            read = Counted.bytes_read
        expected = np.asarray(source.convert(*stored))
        held = {}
        for shard, index in enumerate(indices(source.partition, expected.shape)):
            if shard in OWN:
                np.testing.assert_array_equal(parts[index], expected[index], err_msg=target.name)
                held[str(index)] = expected[index].nbytes
        assert read <= sum(held.values()), target.name
        if TENSOR_AXIS in source.partition:
            all_read += read
            all_stored += sum(tensor.nbytes for tensor in stored)
    assert all_read <= 0.6 * all_stored  # KV heads are fewer than shards, so each is read by two
