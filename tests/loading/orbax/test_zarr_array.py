import json
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jpaged.loading.orbax.zarr_array import ZarrArray
from jpaged.loading.parameters.placement import own_parts

VALUES = np.arange(6 * 10, dtype=np.float32).reshape(6, 10)


def write(folder, values, chunk, **changes):
    """Write what the format's specification says: chunks at the border are whole, filled with anything."""
    folder.mkdir()
    about = {"zarr_format": 2, "compressor": None, "filters": None, "order": "C", "dimension_separator": "."}
    about |= {"shape": values.shape, "chunks": chunk, "dtype": values.dtype.str} | changes
    (folder / ".zarray").write_text(json.dumps(about))
    counts = [-(-size // part) for size, part in zip(values.shape, chunk, strict=True)]
    padded = np.full([n * part for n, part in zip(counts, chunk, strict=True)], 99, values.dtype)
    padded[tuple(map(slice, values.shape))] = values
    for number in np.ndindex(*counts):
        part = padded[tuple(slice(n * size, (n + 1) * size) for n, size in zip(number, chunk, strict=True))]
        (folder / ".".join(map(str, number))).write_bytes(part.tobytes())
    return folder


@pytest.fixture(scope="module")
def cut(tmp_path_factory):
    """Chunks that do not divide the shape."""
    return ZarrArray(write(tmp_path_factory.mktemp("zarr") / "a", VALUES, (4, 3)))


@given(st.lists(st.integers(0, 6), min_size=2, max_size=2), st.lists(st.integers(0, 10), min_size=2, max_size=2))
def test_any_slice_is_that_of_the_whole_array(cut, rows, columns):
    index = slice(*sorted(rows)), slice(*sorted(columns))
    np.testing.assert_array_equal(cut[index], VALUES[index])


def test_all_of_it_can_be_asked_for(cut):
    np.testing.assert_array_equal(np.asarray(cut), VALUES)
    assert (cut.shape, cut.ndim, cut.dtype) == ((6, 10), 2, np.float32)


def test_a_chunk_is_what_a_cpu_device_will_hold_unless_it_must_be_cast(tmp_path):
    whole = slice(None), slice(None)
    every = SimpleNamespace(addressable_devices_indices_map=lambda shape: {0: whole})
    array = ZarrArray(write(tmp_path / "a", VALUES, VALUES.shape))
    held = own_parts(array, np.dtype(np.float32), every)[whole]
    assert not held.flags.writeable, "pages of the file"
    cast = own_parts(array, np.dtype(ml_dtypes.bfloat16), every)[whole]
    np.testing.assert_array_equal(cast, VALUES.astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.int8])
def test_what_orbax_writes_is_read(tmp_path, dtype):
    values = VALUES.astype(dtype)
    handler = ocp.PyTreeCheckpointHandler(use_compression=False, use_ocdbt=False)
    ocp.Checkpointer(handler).save(tmp_path / "saved", args=ocp.args.PyTreeSave({"a.b": values}))
    found = ZarrArray(tmp_path / "saved" / "a.b")
    assert found.dtype == values.dtype
    np.testing.assert_array_equal(np.asarray(found), values)


def test_what_it_cannot_read_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"has no array absent"):
        ZarrArray(tmp_path / "absent")
    folder = write(tmp_path / "small", VALUES, VALUES.shape, compressor={"id": "zstd"})
    with pytest.raises(ValueError, match=r"small is no array of raw chunks: .*zstd"):
        ZarrArray(folder)
    folder = write(tmp_path / "short", VALUES, VALUES.shape)
    (folder / "0.0").write_bytes(bytes(239))
    with pytest.raises(ValueError, match=r"is damaged: short/0.0 is not 240 bytes"):
        np.asarray(ZarrArray(folder))
