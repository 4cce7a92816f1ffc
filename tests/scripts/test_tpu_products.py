"""Products as the compiler expects them: few rows wait for the matrix, many for the matrix units."""

from __future__ import annotations

import pytest

from scripts.compiled_code.tpu_chips import CHIPS
from scripts.compiled_code.tpu_products import EXPECTED, product_seconds


@pytest.mark.parametrize("target", EXPECTED)
def test_a_product_takes_longer_than_its_bytes_and_its_flop_at_their_peaks(target):
    chip = CHIPS[target]
    for rows in (1, 64, 1024, 8192):
        for inputs, outputs in ((512, 4096), (8192, 28672)):
            seconds = product_seconds(target, rows, inputs, outputs)
            assert seconds > 2 * inputs * outputs / chip.hbm
            assert seconds > 2 * rows * inputs * outputs / chip.flops


@pytest.mark.parametrize("target", EXPECTED)
def test_few_rows_take_as_long_as_one_and_many_as_long_as_they_are(target):
    assert product_seconds(target, 1, 4096, 4096) == product_seconds(target, 64, 4096, 4096)
    many = [product_seconds(target, rows, 4096, 4096) for rows in (4096, 8192, 12288)]
    assert many[2] - many[1] == pytest.approx(many[1] - many[0])
