"""A model that gguf-split cut into files is read from its first part, as the whole file is."""

import re

import numpy as np
import pytest
from gguf_files import EMBEDDING, write_gguf

from jpaged.loading.gguf.reader import GGUFFile

TENSORS = EMBEDDING | {f"blk.{n}.ffn_up.weight": np.full((4, 64), n, np.float32) for n in range(3)}


def parts_of(folder, *, count=2, numbers=None, total=None):
    """Write the tensors in two files, as gguf-split names and describes them."""
    names = list(TENSORS)
    for part, own in enumerate((names[:2], names[2:])):
        said = {"split.no": (numbers or [0, 1])[part], "split.count": count, "split.tensors.count": total or len(names)}
        path = folder / f"m-{part + 1:05}-of-{count:05}.gguf"
        write_gguf(path, "llama", {name: TENSORS[name] for name in own}, said)
    return folder / f"m-00001-of-{count:05}.gguf"


def test_the_first_part_reads_all_tensors(tmp_path):
    file = GGUFFile(parts_of(tmp_path))
    assert list(file.tensors) == list(TENSORS)
    for name, array in TENSORS.items():
        np.testing.assert_array_equal(file.stored_rows(name), array)


def test_a_later_part_says_which_to_name(tmp_path):
    parts_of(tmp_path)
    later = tmp_path / "m-00002-of-00002.gguf"
    with pytest.raises(ValueError, match=re.escape(f"{later} is part 2 of 2: name the first, {tmp_path}/m-00001")):
        GGUFFile(later)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"count": 3}, "is the first of 3 parts, and .*m-00003-of-00003.gguf is missing"),
        ({"numbers": [0, 2]}, "m-00002-of-00002.gguf does not say that it is part 2 of 2"),
        ({"total": 7}, "and its parts have 4 tensors, and say that they have 7"),
    ],
)
def test_parts_that_do_not_fit_are_named(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        GGUFFile(parts_of(tmp_path, **settings))


@pytest.mark.parametrize("suffix", [".GGUF", ".bin", ""])
def test_parts_may_have_another_suffix(tmp_path, suffix):
    parts_of(tmp_path)
    for path in list(tmp_path.glob("*.gguf")):
        path.rename(path.with_suffix(suffix))
    first = tmp_path / f"m-00001-of-00002{suffix}"
    assert list(GGUFFile(first).tensors) == list(TENSORS)
    with pytest.raises(ValueError, match=re.escape(f"name the first, {first}")):
        GGUFFile(tmp_path / f"m-00002-of-00002{suffix}")


def test_a_part_of_another_name_says_its_name(tmp_path):
    renamed = parts_of(tmp_path).rename(tmp_path / "model.gguf")
    with pytest.raises(ValueError, match=r"model\.gguf is part 1 of 2: its name must end in -00001-of-00002\.gguf"):
        GGUFFile(renamed)
