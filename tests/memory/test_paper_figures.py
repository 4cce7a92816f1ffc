"""Examples of the PagedAttention paper, block numbers and all."""

from __future__ import annotations

from memory_pools import full_manager


def test_figure_9_beam_search():
    """Four beams over blocks of 4 tokens; beams 0 and 3 drop out and all that go on come from beams 1 and 2."""
    manager = full_manager(13, 4)
    ref_count = manager.parts.allocator.groups[0].ref_count

    def append(*beams: int) -> None:
        """One block of tokens each, which the sequences share with none."""
        for beam in beams:
            length = manager.capacity(beam)
            assert manager.allocate(beam, length + 4, first_write=length) == []

    def tables(*beams: int) -> list[list[int]]:
        return [list(manager.block_table(beam, 0)) for beam in beams]

    manager.add(0, request_id=0)
    append(0)  # the prompt
    manager.fork(0, 3)
    append(0, 3, 0, 3)
    manager.fork(0, 1)
    manager.fork(0, 2)
    append(0, 1, 2, 3)
    assert tables(0, 1, 2, 3) == [[0, 1, 3, 5], [0, 1, 3, 6], [0, 1, 3, 7], [0, 2, 4, 8]]
    assert [ref_count[block] for block in range(9)] == [4, 3, 1, 3, 1, 1, 1, 1, 1]

    manager.free(0)
    manager.free(3)
    assert [block for block in range(9) if ref_count[block] == 0] == [2, 4, 5, 8]
    manager.fork(1, 10)
    manager.fork(2, 20)
    append(1, 10, 2, 20)
    # The figure goes on with blocks 9 to 12; here the freed ones come first, as their memory is there already.
    assert tables(1, 10, 2, 20) == [[0, 1, 3, 6, 2], [0, 1, 3, 6, 4], [0, 1, 3, 7, 8], [0, 1, 3, 7, 5]]
    assert [ref_count[block] for block in (0, 1, 3, 6, 7)] == [4, 4, 4, 2, 2]
    assert [ref_count[block] for block in (2, 4, 5, 8)] == [1] * 4
    manager.check_invariants()
