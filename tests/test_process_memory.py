"""A process of the tests gives programs up when what it holds has grown, and only then."""

import mmap

import jax
import pytest
from process_memory import Released, num_mappings, resident_bytes

pytestmark = pytest.mark.skipif(not num_mappings(), reason="the system does not say what a process holds")


def neighbours(count):
    """Ranges of addresses that the system cannot join: every other one can be written."""
    for number in range(count):
        yield mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE * (number % 2))


def test_programs_are_given_up_when_mappings_have_been_added_and_not_again_before_more_are():
    released, program = Released(most_mappings=150), jax.jit(lambda x: x + 1)
    program(1)
    assert not released.release() and program._cache_size() == 1
    held = list(neighbours(200))
    assert released.release() and program._cache_size() == 0
    program(1)
    assert not released.release() and program._cache_size() == 1
    for each in held:
        each.close()


def test_programs_are_given_up_when_memory_has_been_added():
    released = Released(most_bytes=64 << 20)
    assert not released.release()
    held = bytearray(b"x" * (100 << 20))
    assert released.release() and resident_bytes() > len(held)
    assert not released.release()
