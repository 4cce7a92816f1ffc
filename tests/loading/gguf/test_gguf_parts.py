"""A process reads of a GGUF file the rows and blocks that its devices hold: bytes taken of the file are counted."""

from dataclasses import replace

import numpy as np
import pytest
from dense_model import abstract
from gguf import GGMLQuantizationType as Encoding
from gguf import quants
from gguf_files import write_quantised_llama
from hypothesis import given
from hypothesis import strategies as st
from test_own_parts import OWN, SHARDS, Counted, counting, holding, indices

from jpaged.loading.gguf.config import config_from_gguf
from jpaged.loading.gguf.reader import GGUFFile
from jpaged.loading.gguf.rows import GGUFRows
from jpaged.loading.gguf.weights import GGUFWeights
from jpaged.loading.parameters.placement import own_parts
from jpaged.loading.parameters.targets import targets_of
from jpaged.model_api import TENSOR_AXIS

VALUES = np.random.default_rng(0).standard_normal((8, 128), np.float32)


def matrix(encoding, order=None):
    stored = quants.quantize(VALUES, encoding)
    unit, items = (1, 1) if encoding == Encoding.F32 else (32, stored.shape[1] // 4)
    rows = range(8) if order is None else np.array(order)
    return GGUFRows(stored, lambda part: quants.dequantize(part, encoding), unit, items, VALUES.dtype, rows, range(128))


@given(
    encoding=st.sampled_from([Encoding.Q8_0, Encoding.Q4_1, Encoding.F32]),
    order=st.none() | st.permutations(range(8)),
    rows=st.lists(st.integers(0, 8), min_size=2, max_size=2, unique=True).map(sorted),
    values=st.lists(st.integers(0, 128), min_size=2, max_size=2, unique=True).map(sorted),
    transposed=st.booleans(),
)
def test_a_slice_is_that_of_the_decoded_matrix(encoding, order, rows, values, transposed):
    lazy = matrix(encoding, order)
    whole = quants.dequantize(quants.quantize(VALUES, encoding), encoding)[list(order or range(8))]
    index = slice(*rows), slice(*values)
    if transposed:
        lazy, whole, index = lazy.T, whole.T, index[::-1]
    assert (lazy.shape, len(lazy)) == (whole.shape, len(whole))
    np.testing.assert_array_equal(np.asarray(lazy[index]), whole[index])
    heads = lazy.reshape(4, whole.shape[0] // 4, -1)
    np.testing.assert_array_equal(np.asarray(heads[3]), whole.reshape(4, -1, whole.shape[1])[3])


def test_heads_that_do_not_fit_are_told():
    with pytest.raises(ValueError, match=r"cannot reshape \(8, 128\) into \(3, 2, 128\)"):
        matrix(Encoding.Q8_0).reshape(3, 2, 128)


SHARED_BLOCKS = {"embed_tokens": 0.5, "qkv": 0.75, "gate_up": 0.5, "out": 1.0, "down": 1.0}
"""The share of the file's bytes that half of the shards read: a KV head and a block of 32 columns serve two."""


def test_columns_are_read_by_blocks():
    rows = matrix(Encoding.Q4_1)
    counted = replace(rows, stored=rows.stored.view(Counted), decode=lambda part: rows.decode(part.view(np.ndarray)))
    with counting():
        np.asarray(counted.T[33:64, 2:6])
        assert Counted.bytes_read == rows.stored.nbytes * 4 // 8 // 4


@pytest.mark.parametrize(
    ("encoding", "fractions"),
    [(Encoding.Q4_1, SHARED_BLOCKS), (Encoding.F32, SHARED_BLOCKS | {"out": 0.5, "down": 0.5})],
)
def test_no_more_is_read_than_the_devices_hold_but_for_the_rest_of_a_block(encoding, fractions, tmp_path, monkeypatch):
    path = write_quantised_llama(tmp_path / "m.gguf", encoding)
    counted, whole = GGUFFile(path), GGUFWeights(GGUFFile(path))
    stored_rows, decode = counted.stored_rows, counted.decode
    monkeypatch.setattr(counted, "stored_rows", lambda name: stored_rows(name).view(Counted))
    monkeypatch.setattr(counted, "decode", lambda name, rows: decode(name, rows.view(np.ndarray)))
    reader = GGUFWeights(counted)
    read = {}
    for target in targets_of(abstract(config_from_gguf(counted), tensor_parallel=SHARDS)):
        source = target.source
        if TENSOR_AXIS not in source.partition:
            continue
        array = source.convert(*map(reader.read, source.sources))
        with counting():
            parts = own_parts(array, array.dtype, holding(source.partition, OWN))
            stored = sum(stored_rows(whole._stored[name].names[0]).nbytes for name in source.sources)
            read[source.path[-2]] = Counted.bytes_read / stored
        expected = np.asarray(source.convert(*(np.asarray(whole.read(name)) for name in source.sources)))
        for shard, index in enumerate(indices(source.partition, expected.shape)):
            if shard in OWN:
                np.testing.assert_array_equal(parts[index], expected[index], err_msg=target.name)
    assert read == fractions
