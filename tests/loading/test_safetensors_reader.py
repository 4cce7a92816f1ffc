import json
import struct

import ml_dtypes
import numpy as np
import pytest
from toy_family import toy_config, toy_tensors, write_safetensors

from jpaged.loading.safetensors_reader import SafetensorsWeights


@pytest.mark.parametrize("dtype", [np.float16, np.float32, ml_dtypes.bfloat16])
def test_tensors_come_back_as_stored(tmp_path, dtype):
    tensors = toy_tensors(toy_config(), dtype)
    reader = SafetensorsWeights(write_safetensors(tmp_path, tensors))
    assert set(reader.names()) == set(tensors)
    assert reader.stored_dtype == dtype
    for name, tensor in tensors.items():
        assert reader.shape(name) == tensor.shape
        np.testing.assert_array_equal(reader.read(name), tensor)


def test_reading_is_a_view_of_the_file(tmp_path):
    reader = SafetensorsWeights(write_safetensors(tmp_path, toy_tensors(toy_config())))
    assert not reader.read("embed").flags.owndata


def shards(folder):
    tensors = toy_tensors(toy_config())
    names = sorted(tensors)
    files = {"one.safetensors": names[:4], "two.safetensors": names[4:]}
    for file, part in files.items():
        write_safetensors(folder, {name: tensors[name] for name in part}, file)
    weight_map = {name: file for file, part in files.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return tensors


def test_an_index_joins_shards(tmp_path):
    tensors = shards(tmp_path)
    reader = SafetensorsWeights(tmp_path)
    assert set(reader.names()) == set(tensors)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(reader.read(name), tensor)


def test_an_absent_shard_is_named(tmp_path):
    shards(tmp_path)
    (tmp_path / "two.safetensors").unlink()
    with pytest.raises(ValueError, match=r"lacks 1 of 2 shards, first: two\.safetensors"):
        SafetensorsWeights(tmp_path)


def test_a_folder_of_pytorch_files_says_what_to_do(tmp_path):
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ValueError, match=r"no \*\.safetensors \(pytorch_model\.bin is a PyTorch file"):
        SafetensorsWeights(tmp_path)


@pytest.mark.parametrize("keep", [4, 40, -1])
def test_a_file_cut_short_is_refused(tmp_path, keep):
    file = write_safetensors(tmp_path, toy_tensors(toy_config())) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ValueError, match="is damaged"):
        SafetensorsWeights(tmp_path)


def test_a_type_that_is_not_read_is_named(tmp_path):
    entry = {"dtype": "F8_E4M3", "shape": [2], "data_offsets": [4, 6]}
    header = {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "b": entry}
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(6))
    with pytest.raises(ValueError, match=r"tensor b .* has type F8_E4M3"):
        SafetensorsWeights(tmp_path).read("b")


def test_a_whole_file_comes_before_an_index_and_a_tensor_that_two_files_hold_is_refused(tmp_path):
    tensors = shards(tmp_path)
    write_safetensors(tmp_path, {"embed": tensors["embed"] + 1}, "model.safetensors")
    np.testing.assert_array_equal(SafetensorsWeights(tmp_path).read("embed"), tensors["embed"] + 1)
    for name in ("model.safetensors", "model.safetensors.index.json"):
        (tmp_path / name).unlink()
    write_safetensors(tmp_path, {"embed": tensors["embed"] + 1}, "old.safetensors")
    with pytest.raises(ValueError, match=r"tensor embed is in .*one\.safetensors and in .*old\.safetensors: which"):
        SafetensorsWeights(tmp_path)


@pytest.mark.parametrize("header", [b"[1]", b"{", b"\xff\xfe", b'{"a": 1}', b'{"a": {"dtype": "F32", "shape": [1]}}'])
def test_a_file_whose_header_is_none_is_named(tmp_path, header):
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged: its header is"):
        SafetensorsWeights(tmp_path)


def test_an_index_that_is_none_is_named(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match=r"index\.json is damaged: KeyError\('weight_map'\)"):
        SafetensorsWeights(tmp_path)
