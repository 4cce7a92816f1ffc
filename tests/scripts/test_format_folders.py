"""Folders written by the formats' public definitions hold what jpaged reads, and are near the model."""

import numpy as np
import pytest
from coded_checkpoints import float_llama, save

from jpaged.loading.open_checkpoint import open_model
from scripts.benchmarks.format_folders import DEFINED, GROUP, write_bfloat16, write_defined

ERRORS = {"W4A16 with zero points": 0.11, "NF4": 0.11, "MLX, 4 bits": 0.11, "FP8": 0.03}
"""Formats -> the relative error of values that are normal; of codes of 8 bits it is below one per cent."""


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    config, tensors = float_llama()
    return save(tmp_path_factory.mktemp("plain") / "model", config, tensors), tensors


@pytest.mark.parametrize("name", DEFINED)
def test_the_loader_reads_the_values_that_were_written(name, plain, tmp_path):
    folder, tensors = plain
    values = write_defined(DEFINED[name], folder, tmp_path / "out")
    assert values.keys() == {key for key in tensors if key.endswith("_proj.weight")}
    reader = open_model(tmp_path / "out").reader
    for key, tensor in tensors.items():
        found = np.asarray(reader.read(key), np.float32)
        if key not in values:
            np.testing.assert_array_equal(found, tensor)
            continue
        np.testing.assert_allclose(found, values[key].numpy(), rtol=1e-6, atol=1e-8)
        error = np.sqrt(np.square(found - tensor).mean() / np.square(tensor).mean())
        assert 0 < error < ERRORS.get(name, 0.01), key


def test_every_row_divides_into_the_groups_that_the_formats_have(plain):
    assert all(tensor.shape[1] % GROUP == 0 for key, tensor in plain[1].items() if key.endswith("_proj.weight"))


def test_a_folder_in_bfloat16_says_so_and_keeps_the_names(plain, tmp_path):
    folder, tensors = plain
    write_bfloat16(folder, tmp_path / "out")
    opened = open_model(tmp_path / "out")
    assert str(opened.config.dtype).removeprefix("torch.") == "bfloat16"
    assert set(opened.reader.names()) == set(tensors)
    assert {opened.reader.dtype(name).name for name in tensors} == {"bfloat16"}
