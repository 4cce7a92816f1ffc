"""A file of blocks: what was written is read, what was damaged is not, and nothing lies outside it."""

from __future__ import annotations

import os
import resource

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thorough import examples

from jpaged.execution.transfer.tiers import BlockFile, DamagedBlock


@pytest.fixture
def file(tmp_path):
    file = BlockFile(tmp_path / "made" / "for it", 1 << 16)
    yield file
    file.close()


def content(seed: int, size: int = 100) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def flip(file: BlockFile, place: int, bits: int) -> None:
    (byte,) = os.pread(file._file.fileno(), 1, place)
    os.pwrite(file._file.fileno(), bytes([byte ^ bits]), place)


def test_what_was_written_is_read_under_its_name_only(file):
    file.write(40, b"one", content(1).reshape(2, 50))
    assert (file.read(40, b"one", 100) == content(1)).all()
    for place, name, size in ((40, b"two", 100), (40, b"one", 99), (41, b"one", 100)):
        with pytest.raises(DamagedBlock):
            file.read(place, name, size)


def test_one_flipped_bit_is_found(file):
    file.write(0, b"one", content(1))
    flip(file, 57, 4)
    with pytest.raises(DamagedBlock, match="the 100 bytes at 0 are not those that were written"):
        file.read(0, b"one", 100)


def test_a_block_of_a_file_that_was_cut_is_damaged(tmp_path):
    """On a map such a read ends the process."""
    file = BlockFile(tmp_path, 1 << 16, identity=bytes(16))
    for place in (0, 40_000):
        file.write(place, b"one", content(1))
    os.truncate(next(tmp_path.glob("*.blocks")), 40_050)
    assert (file.read(0, b"one", 100) == content(1)).all()
    file.will_read(40_000, 100)
    with pytest.raises(DamagedBlock):
        file.read(40_000, b"one", 100)
    file.close()


def test_the_file_has_no_name_and_its_space_is_taken_at_once(file, tmp_path):
    folder = tmp_path / "made" / "for it"
    assert list(folder.iterdir()) == []
    assert file.num_bytes == 1 << 16


@pytest.mark.parametrize("place", [-1, (1 << 16) - 99])
def test_nothing_is_written_outside_the_file(file, place):
    with pytest.raises(ValueError, match=f"100 bytes at place={place} are outside the file's 65536"):
        file.write(place, b"one", content(1))


def test_a_folder_that_cannot_be_made_or_has_no_room_is_an_error_of_the_system(tmp_path):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(OSError):
        BlockFile(tmp_path / "file" / "below", 100)
    with pytest.raises(OSError):
        BlockFile(tmp_path, 1 << 62)


def test_a_write_for_which_there_is_no_room_is_an_error_of_the_system(file):
    file.write(200, b"one", content(1))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (250, hard))
    try:
        with pytest.raises(OSError, match="too large"):
            file.write(200, b"two", content(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    for name in (b"one", b"two"):
        with pytest.raises(DamagedBlock):
            file.read(200, name, 100)
    file.write(200, b"two", content(2))
    assert (file.read(200, b"two", 100) == content(2)).all()


def test_what_was_forgotten_cannot_be_read(file):
    file.write(0, b"one", content(1))
    file.forget_all()
    with pytest.raises(DamagedBlock):
        file.read(0, b"one", 100)


def test_a_measurement_gives_speeds_and_leaves_nothing(file):
    speeds = file.measure()
    assert speeds.write_rate > 0 and speeds.read_rate > 0 and speeds.latency >= 0
    with pytest.raises(DamagedBlock):
        file.read(0, b"sample", 1 << 16)


@settings(max_examples=examples(150), deadline=None)
@given(
    moves=st.lists(
        st.tuples(st.sampled_from(["write", "write", "damage", "forget"]), st.integers(0, 7), st.integers(0, 50)),
        max_size=30,
    )
)
def test_a_read_gives_what_was_written_last_or_nothing(moves, tmp_path_factory):
    file = BlockFile(tmp_path_factory.mktemp("blocks"), 8 * 64)
    there: dict[int, int] = {}
    try:
        for what, slot, seed in moves:
            if what == "write":
                file.write(64 * slot, bytes([seed]), content(seed, 64))
                there[slot] = seed
            elif what == "damage":
                flip(file, 64 * slot + seed, 1 + seed)
                there.pop(slot, None)
            elif seed < 5:
                file.forget_all()
                there.clear()
            for at in range(8):
                name = there.get(at, seed)
                try:
                    assert (file.read(64 * at, bytes([name]), 64) == content(name, 64)).all()
                except DamagedBlock:
                    assert at not in there
    finally:
        file.close()
