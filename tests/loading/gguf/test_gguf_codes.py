import numpy as np
import pytest
from gguf import GGMLQuantizationType as Encoding
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES

from jpaged.loading.gguf.blocks import CODED, split_rows
from jpaged.loading.weight_formats.stored_codes import as_numbers

HALVES = {
    Encoding.Q8_0: [0],
    Encoding.Q4_0: [0],
    Encoding.Q4_1: [0, 2],
    Encoding.Q4_K: [0, 2],
    Encoding.Q6_K: [208],
    Encoding.Q5_0: [0],
    Encoding.Q5_1: [0, 2],
    Encoding.Q5_K: [0, 2],
    Encoding.Q3_K: [108],
    Encoding.Q2_K: [80, 82],
    Encoding.IQ4_NL: [0],
    Encoding.IQ4_XS: [0],
    Encoding.MXFP4: [],
}
"""Where a block's float16 numbers lie."""


def random_rows(encoding, rows=5, blocks=3):
    """Every bit random but for the float16 numbers, which are finite."""
    rng = np.random.default_rng(0)
    size = GGML_QUANT_SIZES[encoding][1]
    raw = rng.integers(0, 256, (rows * blocks, size), dtype=np.uint8)
    for at in HALVES[encoding]:
        raw[:, at : at + 2] = rng.standard_normal((len(raw), 1)).astype(np.float16).view(np.uint8)
    if encoding == Encoding.MXFP4:
        raw[:, 0] = rng.integers(1, 255, len(raw))  # 255 is no number
    return raw.reshape(rows, -1)


def test_every_encoding_that_is_kept_is_tested():
    assert CODED.keys() == HALVES.keys()


@pytest.mark.parametrize("encoding", CODED, ids=lambda encoding: encoding.name)
def test_codes_scales_and_minimums_give_the_gguf_packages_values_to_the_last_bit(encoding):
    raw = random_rows(encoding)
    codes, scales, minimums = split_rows(raw, encoding)
    form = CODED[encoding].format
    assert codes.dtype == form.codec.dtype
    assert scales.dtype == form.scales
    assert (minimums is not None) == form.minimums
    assert not form.codec.paired or codes.max() <= 15
    codes, scales = as_numbers(codes, scales, form.codec)
    grouped = codes.reshape(len(raw), -1, form.group).astype(np.float32)
    values = grouped * scales.astype(np.float32)[..., None]
    if minimums is not None:
        values += minimums.astype(np.float32)[..., None]
    np.testing.assert_array_equal(values.reshape(len(raw), -1), quants.dequantize(raw, encoding))
