import struct

import gguf
import numpy as np
import pytest
from gguf_files import EMBEDDING, write_gguf

from jpaged.loading.demo_model import fetch_demo_model
from jpaged.loading.gguf.reader import GGUFFile


@pytest.fixture(scope="module")
def demo():
    return GGUFFile(fetch_demo_model())


@pytest.fixture(scope="module")
def reference(demo):
    return gguf.GGUFReader(str(demo.path))


def test_metadata_is_what_the_gguf_package_reads(demo, reference):
    expected = {k: field.contents() for k, field in reference.fields.items() if not k.startswith("GGUF.")}
    assert demo.metadata == expected


def test_tensors_are_what_the_gguf_package_reads(demo, reference):
    assert list(demo.tensors) == [tensor.name for tensor in reference.tensors]
    for tensor in reference.tensors[:12] + reference.tensors[-3:]:
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        found = demo.decode(tensor.name, demo.stored_rows(tensor.name))
        np.testing.assert_array_equal(found, expected, err_msg=tensor.name)
        assert demo.tensors[tensor.name].shape == found.shape


def test_all_value_types_are_read(tmp_path):
    values = {"a": True, "b": 7, "c": 0.5, "d": "text", "e": [1, 2, 3], "f": ["x", "yz"], "g": [0.5, 2.0]}
    file = GGUFFile(write_gguf(tmp_path / "m.gguf", "llama", EMBEDDING, values))
    assert {key: file.metadata[key] for key in values} == values


@pytest.mark.parametrize("keep", [0, 10, 100, 400, -8])
def test_a_file_cut_short_is_refused(tmp_path, keep):
    path = write_gguf(tmp_path / "m.gguf", "llama", EMBEDDING)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"m\.gguf is (cut short|not a GGUF file)"):
        GGUFFile(path)


def test_another_format_is_refused(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(ValueError, match=r"not a GGUF file: it starts with b'PK"):
        GGUFFile(path)


@pytest.mark.parametrize("alignment", [0, "text"])
def test_a_header_that_makes_no_sense_is_refused_with_the_files_name(tmp_path, alignment):
    path = write_gguf(tmp_path / "m.gguf", "llama", EMBEDDING, {})
    data = path.read_bytes()
    written = b"general.alignment"
    kind, value = (8, struct.pack("<Q", 4) + b"text") if alignment == "text" else (4, struct.pack("<I", alignment))
    key = struct.pack("<Q", len(written)) + written + struct.pack("<I", kind) + value
    (keys,) = struct.unpack_from("<Q", data, 16)
    path.write_bytes(data[:16] + struct.pack("<Q", keys + 1) + key + data[24:])
    with pytest.raises(ValueError, match=r"m\.gguf is damaged, or of a newer form"):
        GGUFFile(path)
