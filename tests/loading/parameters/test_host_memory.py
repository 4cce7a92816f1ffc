import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jpaged.loading.parameters.placement import ALIGNMENT, HostMemory


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 70)), max_size=20))
def test_arrays_are_aligned_and_do_not_overlap(shapes):
    memory = HostMemory()
    arrays = [memory.empty(shape, np.dtype(np.float16)) for shape in shapes]
    for number, array in enumerate(arrays):
        array[...] = number
    for number, (array, shape) in enumerate(zip(arrays, shapes, strict=True)):
        assert array.shape == shape
        assert array.ctypes.data % ALIGNMENT == 0 or array.size == 0
        assert (array == number).all()


def test_a_large_array_has_memory_of_its_own():
    memory = HostMemory()
    small, large = memory.empty((8,), np.dtype(np.int8)), memory.empty((20 << 20,), np.dtype(np.int8))
    again = memory.empty((8,), np.dtype(np.int8))
    assert large.ctypes.data % ALIGNMENT == 0
    assert again.ctypes.data - small.ctypes.data == ALIGNMENT, "cut from one piece"
