"""What dtype="auto" becomes, and which dtypes are refused where."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from jpaged.loading.build_context import capability_of, check_dtype, chosen_dtype
from jpaged.loading.tensor_reader import StoredAs

BFLOAT16, HALF, FLOAT32 = (np.dtype(of) for of in (ml_dtypes.bfloat16, np.float16, np.float32))


def stored(dtype, quantised=False):
    return StoredAs(dtype, quantised)


@pytest.mark.parametrize(
    ("held", "platform", "capability", "chosen"),
    [
        (stored(BFLOAT16), "cpu", None, "float32"),
        (stored(HALF), "cpu", None, "float32"),
        (stored(FLOAT32), "tpu", None, "float32"),
        (stored(BFLOAT16), "tpu", None, "bfloat16"),
        (stored(HALF), "tpu", None, "bfloat16"),
        (stored(FLOAT32), "gpu", 9.0, "float32"),
        (stored(BFLOAT16), "gpu", 9.0, "bfloat16"),
        (stored(HALF), "gpu", 9.0, "float16"),
        (stored(HALF), "cuda", 8.0, "float16"),
        (stored(FLOAT32, quantised=True), "gpu", 9.0, "bfloat16"),
        (stored(FLOAT32), "gpu", 7.5, "float32"),
        (stored(BFLOAT16), "gpu", 7.5, "float16"),
        (stored(HALF), "cuda", 7.5, "float16"),
        (stored(FLOAT32, quantised=True), "gpu", 7.5, "float16"),
        (stored(BFLOAT16), "rocm", None, "bfloat16"),
    ],
)
def test_auto_is_what_the_checkpoint_holds_where_the_device_multiplies_it(held, platform, capability, chosen):
    assert chosen_dtype(held, platform, capability) == chosen


@pytest.mark.parametrize(
    ("held", "platform", "capability", "said"),
    [
        (BFLOAT16, "gpu", 7.5, "dtype: float16, as compute capability 7.5 has no bfloat16"),
        (HALF, "tpu", None, "dtype: bfloat16, as a tpu has no fast float16"),
    ],
)
def test_the_log_tells_when_weights_are_rounded_or_might_overflow(held, platform, capability, said, caplog):
    with caplog.at_level(logging.INFO, logger="jpaged"):
        chosen_dtype(stored(held), platform, capability)
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith(said)


def test_nothing_is_said_where_nothing_is_lost(caplog):
    with caplog.at_level(logging.INFO, logger="jpaged"):
        chosen_dtype(stored(HALF), "gpu", 7.5)
        chosen_dtype(stored(BFLOAT16), "gpu", 8.0)
        chosen_dtype(stored(BFLOAT16), "cpu")
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("dtype", "platform", "capability", "message"),
    [
        ("float64", "gpu", 9.0, "dtype='float64' is not one of auto, float32, bfloat16, float16"),
        ("float16", "cpu", None, "dtype='float16' needs a GPU: a cpu has no fast float16"),
        ("float16", "tpu", None, "dtype='float16' needs a GPU: a tpu has no fast float16"),
        (
            "bfloat16",
            "gpu",
            7.5,
            "needs a GPU of compute capability 8.0 or more, and this one has 7.5.*use dtype='float",
        ),
    ],
)
def test_a_dtype_that_would_be_slow_is_refused_with_what_to_use(dtype, platform, capability, message):
    with pytest.raises(ValueError, match=message):
        check_dtype(dtype, platform, capability)


@pytest.mark.parametrize(
    ("dtype", "platform", "capability"),
    [("float16", "gpu", 7.5), ("float32", "gpu", 7.5), ("bfloat16", "cuda", 8.0), ("bfloat16", "tpu", None)],
)
def test_others_are_taken(dtype, platform, capability):
    check_dtype(dtype, platform, capability)


@pytest.mark.parametrize(
    ("device", "capability"),
    [
        (SimpleNamespace(compute_capability="7.5"), 7.5),
        (SimpleNamespace(compute_capability="gfx942"), None),
        (SimpleNamespace(), None),
    ],
)
def test_only_nvidias_devices_have_a_compute_capability(device, capability):
    assert capability_of(device) == capability
