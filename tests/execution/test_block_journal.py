"""Files of blocks that stay: found again by the next process, torn ones refused, one writer and several readers."""

from __future__ import annotations

import math
import resource
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thorough import examples

from jpaged.execution.transfer.tiers import BlockFile, DamagedBlock
from jpaged.execution.transfer.tiers.block_journal import BlockJournal
from jpaged.memory.hash_chain import Link
from jpaged.memory.tiers import StoredBlock, TierIndex

IDENTITY, SIZE, PAGE = bytes(range(16)), 4096, 8192


def opened(folder, identity=IDENTITY, pages=4) -> BlockFile:
    return BlockFile(folder, pages * PAGE, identity=identity, page_bytes=PAGE)


def block(number: int, place: int) -> StoredBlock:
    return StoredBlock(0, number.to_bytes(16, "little"), b"tokens %d" % number, place * SIZE, SIZE)


def content(number: int) -> np.ndarray:
    return np.full(SIZE, number, np.uint8)


def write(file: BlockFile, number: int, place: int) -> StoredBlock:
    stored = block(number, place)
    file.write(stored.place, b"%d" % number, content(number), stored)
    return stored


def check(file: BlockFile, number: int, place: int) -> None:
    assert (file.read(place * SIZE, b"%d" % number, SIZE) == content(number)).all()


def test_the_next_process_finds_what_was_written(tmp_path):
    file = opened(tmp_path)
    stored = [write(file, number, number) for number in range(5)]
    file.close()
    again = opened(tmp_path)
    assert again.writes and again.blocks == stored
    for number in range(5):
        check(again, number, number)
    again.close()


def test_a_block_for_which_the_list_has_no_room_is_not_there(tmp_path):
    file, (soft, hard) = opened(tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    long = block(1, 0)._replace(tokens=b"tokens" * 1000)
    resource.setrlimit(resource.RLIMIT_FSIZE, (SIZE + 100, hard))
    try:
        with pytest.raises(OSError, match="No space left on device for the list"):
            file.write(0, b"1", content(1), long)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    with pytest.raises(DamagedBlock):
        file.read(0, b"1", SIZE)
    stored = write(file, 2, 1)
    assert file.blocks == [stored]
    file.close()
    again = opened(tmp_path)
    assert again.blocks == [stored]
    again.close()


def test_salts_keep_their_limit_and_blocks_their_priority(tmp_path):
    def index(**options) -> TierIndex:
        return TierIndex([SIZE], PAGE, 4, **options)

    def put(number: int, tenant: bytes = b"", level: int = 0, until: float = math.inf) -> None:
        stored = before.put(0, Link(number.to_bytes(16, "little"), b"", tenant=tenant), level, until)
        file.write(stored.place, b"%d" % number, content(number), stored)

    file, before, now = opened(tmp_path), index(salt_bytes=3 * SIZE), time.monotonic()
    for number in range(3):
        put(number, b"t" * 16)
    put(3)
    put(4, level=5)
    put(5, level=7, until=now - 1)  # has ended when it is found again
    file.close()
    again = opened(tmp_path)
    after = index(salt_bytes=2 * SIZE)
    after.load(again.blocks)
    again.close()

    def there() -> list[int]:
        numbers = range(20)
        return [n for n in numbers if after.find(0, Link(n.to_bytes(16, "little"), b"")) is not None]

    assert there() == [1, 2, 3, 4, 5], "the salt lost what is over its new limit"
    after.put(0, Link((10).to_bytes(16, "little"), b"", tenant=b"t" * 16))
    assert there() == [2, 3, 4, 5, 10], "it loses its own"
    after.end_levels(now)
    for number in range(11, 19):
        after.put(0, Link(number.to_bytes(16, "little"), b""))
        after.check()
    assert 4 in there() and not {2, 3, 5} & set(there()), "the priority that lasts keeps its block"


@given(st.binary(min_size=16, max_size=16).filter(any), st.integers(-1000, 100), st.sampled_from([10.0, 1e6, math.inf]))
@settings(max_examples=20, deadline=None)
def test_a_list_keeps_a_blocks_salt_and_priority(tmp_path_factory, tenant, level, seconds):
    folder = tmp_path_factory.mktemp("list")
    stored = block(1, 0)._replace(tenant=tenant, level=level, until=time.monotonic() + seconds)
    file = opened(folder)
    file.write(0, b"1", content(1), stored)
    file.close()
    again = opened(folder)
    (found,) = again.blocks
    again.close()
    assert found._replace(until=0.0) == stored._replace(until=0.0)
    assert found.until == pytest.approx(stored.until, abs=1.0)


def test_a_page_that_was_taken_anew_has_its_new_blocks_only(tmp_path):
    file = opened(tmp_path)
    for number, place in ((1, 0), (2, 1), (3, 2), (4, 0)):
        write(file, number, place)
    file.close()
    again = opened(tmp_path)
    assert [stored.digest[0] for stored in again.blocks] == [3, 4]
    again.close()


def test_a_folder_keeps_one_model_and_those_that_are_written(tmp_path):
    first, second = opened(tmp_path), opened(tmp_path, b"x" * 16)
    assert len(list(tmp_path.glob("*.blocks"))) == 2
    first.close()
    second.close()
    opened(tmp_path, b"y" * 16).close()
    assert [path.stem for path in tmp_path.glob("*.blocks")] == [f"jpaged-{(b'y' * 16).hex()}"]


def test_blocks_of_other_weights_and_other_sizes_are_not_there(tmp_path):
    file = opened(tmp_path)
    write(file, 1, 0)
    file.close()
    for identity, pages in ((b"x" * 16, 4), (IDENTITY, 5), (IDENTITY, 4)):
        other = opened(tmp_path, identity, pages)
        assert not other.blocks
        other.close()


@pytest.mark.parametrize("spoil", ["cut", "bytes", "content"])
def test_torn_files_are_refused(tmp_path, spoil):
    file = opened(tmp_path)
    for number in range(3):
        write(file, number, number)
    file.close()
    (journal,), (blocks,) = tmp_path.glob("*.list"), tmp_path.glob("*.blocks")
    there = bytearray((blocks if spoil == "content" else journal).read_bytes())
    if spoil == "cut":
        journal.write_bytes(there[:-3])
    elif spoil == "bytes":
        there[-30] ^= 1
        journal.write_bytes(there)
    else:
        there[2 * SIZE + 7] ^= 1
        blocks.write_bytes(there)
    again = opened(tmp_path)
    check(again, 0, 0)
    check(again, 1, 1)
    with pytest.raises(DamagedBlock):
        again.read(2 * SIZE, b"2", SIZE)
    assert len(again.blocks) == (3 if spoil == "content" else 2)
    write(again, 9, 2)
    again.close()
    third = opened(tmp_path)
    check(third, 9, 2)
    third.close()


def test_one_process_writes_and_others_read_what_it_writes(tmp_path):
    writer = opened(tmp_path)
    write(writer, 1, 0)
    readers = [opened(tmp_path) for _ in range(2)]
    write(writer, 2, 1)
    for reader in readers:
        assert not reader.writes and len(reader.blocks) == 1
        assert [stored.digest[0] for stored in reader.fresh()[1]] == [2] and reader.fresh() == (False, [])
        check(reader, 1, 0)
        check(reader, 2, 1)
    write(writer, 3, 0)  # over what readers know
    with pytest.raises(DamagedBlock):
        readers[0].read(0, b"1", SIZE)
    writer.forget_all()
    assert readers[0].fresh() == (True, [])
    writer.close()
    successor = opened(tmp_path)
    assert successor.writes and not successor.blocks
    for file in (*readers, successor):
        file.close()


def test_a_reader_takes_over_when_the_writer_has_ended(tmp_path):
    writer = opened(tmp_path)
    write(writer, 1, 0)
    one, other = opened(tmp_path), opened(tmp_path)
    write(writer, 2, 1)
    with pytest.raises(OSError, match="not open"):
        write(one, 3, 2)
    writer.close()
    anew, blocks = one.fresh()
    assert anew and one.writes and [stored.digest[0] for stored in blocks] == [1, 2]
    assert not other.writes and [stored.digest[0] for stored in other.fresh()[1]] == [2] and not other.writes
    write(one, 3, 2)
    assert [stored.digest[0] for stored in other.fresh()[1]] == [3]
    check(other, 1, 0)
    check(other, 3, 2)
    assert one.fresh() == (False, [])
    one.close()
    third = opened(tmp_path)
    assert third.writes and len(third.blocks) == 3
    third.close()
    other.close()


def test_a_reader_whose_files_were_removed_takes_nothing_over(tmp_path):
    writer = opened(tmp_path)
    write(writer, 1, 0)
    reader = opened(tmp_path)
    writer.close()
    opened(tmp_path, identity=bytes(16)).close()  # of another model: removes the files that no process writes
    with pytest.raises(FileNotFoundError):  # the tier is off then
        reader.fresh()
    assert not reader.writes and not list(tmp_path.glob(f"*{IDENTITY.hex()}*"))
    reader.close()


def test_a_reader_with_another_size_is_refused(tmp_path):
    writer = opened(tmp_path)
    with pytest.raises(OSError, match="is of other blocks, and another process writes it"):
        opened(tmp_path, pages=2)
    writer.close()


def test_a_reader_waits_for_a_writer_that_begins_at_the_same_time(tmp_path, monkeypatch):
    path = tmp_path / f"jpaged-{IDENTITY.hex()}"
    journal = BlockJournal(path.with_suffix(".list"), IDENTITY, 4 * PAGE, PAGE)
    sizes = iter((1, 8 * PAGE, 4 * PAGE))

    def writer_goes_on(_: float) -> None:
        """Make the file anew, at first with its old size."""
        path.with_suffix(".blocks").write_bytes(bytes(next(sizes)))

    monkeypatch.setattr(time, "sleep", writer_goes_on)
    reader = opened(tmp_path)
    assert not reader.writes and next(sizes, None) is None
    reader.close()
    journal.close()


def test_a_file_of_another_size_is_replaced_and_no_reader_loses_its_own(tmp_path):
    writer, sizes = opened(tmp_path), []
    write(writer, 1, 0)
    reader = opened(tmp_path)
    writer.close()
    for pages in (2, 6):
        file = opened(tmp_path, pages=pages)
        sizes.append((tmp_path / f"jpaged-{IDENTITY.hex()}.blocks").stat().st_size)
        file.close()
    assert sizes == [2 * PAGE, 6 * PAGE]
    check(reader, 1, 0)
    with pytest.raises(OSError, match="a file of another size"):
        reader.fresh()
    other = opened(tmp_path, pages=6)
    assert other.writes and not reader.writes, "what the reader cannot use it leaves to others"
    other.close()
    reader.close()


def test_only_the_owner_may_read_the_files_which_have_the_prompts_tokens(tmp_path):
    file = opened(tmp_path)
    write(file, 1, 0)
    file.forget_all()
    assert {oct(path.stat().st_mode & 0o777) for path in tmp_path.iterdir()} == {"0o600"}
    file.close()


@settings(max_examples=examples(40), deadline=None)
@given(numbers=st.lists(st.integers(0, 30), max_size=60), cut=st.integers(0, 200))
def test_whatever_was_written_and_cut_an_index_loads_it_and_every_block_is_right(tmp_path_factory, numbers, cut):
    folder = tmp_path_factory.mktemp("blocks")
    file, index = opened(folder), TierIndex([SIZE], PAGE, 4)

    for number in numbers:
        stored = index.put(0, Link(number.to_bytes(16, "little"), b"tokens %d" % number))
        if stored is not None:
            file.write(stored.place, b"%d" % number, content(number), stored)
    file.close()
    (journal,) = folder.glob("*.list")
    there = journal.read_bytes()
    journal.write_bytes(there[: max(40, len(there) - cut)])
    again, loaded = opened(folder), TierIndex([SIZE], PAGE, 4)
    loaded.load(again.blocks)
    loaded.check()
    assert len(loaded) == len(again.blocks) and (cut or len(loaded) == len(index))
    for stored in again.blocks:
        try:
            assert (again.read(stored.place, b"%d" % stored.digest[0], SIZE) == content(stored.digest[0])).all()
        except DamagedBlock:
            assert cut, "its place was another's by then"
    assert loaded.put(0, Link(b"n" * 16, b"new")) is not None
    loaded.check()
    again.close()
