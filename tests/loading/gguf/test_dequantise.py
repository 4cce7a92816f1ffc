import numpy as np
import pytest
from gguf import GGMLQuantizationType as Encoding
from gguf import quants

from jpaged.loading.gguf.blocks import dequantise


@pytest.mark.parametrize("encoding", [Encoding.Q4_1, Encoding.Q8_0, Encoding.Q4_0, Encoding.Q5_1])
def test_values_equal_the_gguf_packages(encoding):
    rows = np.random.default_rng(0).standard_normal((300, 7 * 32), np.float32)
    packed = quants.quantize(rows, encoding)
    found = dequantise(packed, encoding)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, quants.dequantize(packed, encoding))


def test_more_blocks_than_a_chunk_are_decoded():
    rows = np.random.default_rng(1).standard_normal((1200, 1024), np.float32)
    packed = quants.quantize(rows, Encoding.Q8_0)
    np.testing.assert_array_equal(dequantise(packed, Encoding.Q8_0), quants.dequantize(packed, Encoding.Q8_0))


def test_rows_keep_their_leading_dimensions():
    packed = quants.quantize(np.ones((2, 3, 64), np.float32), Encoding.Q4_1)
    assert dequantise(packed, Encoding.Q4_1).shape == (2, 3, 64)


def test_an_encoding_without_a_decoder_is_named():
    with pytest.raises(ValueError, match="Q8_1 cannot be dequantised"):
        dequantise(np.zeros((1, 36), np.uint8), Encoding.Q8_1)
