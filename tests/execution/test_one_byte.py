"""What a pool of one byte a value is held in, and on which devices."""

import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from jpaged.execution.one_byte import resolve_kv_dtype


def mesh(**device):
    return SimpleNamespace(devices=np.array([SimpleNamespace(**device)]))


CPU = mesh(platform="cpu", device_kind="cpu")
A100 = mesh(platform="gpu", device_kind="A100", compute_capability="8.0")
L4 = mesh(platform="gpu", device_kind="L4", compute_capability="8.9")
T4 = mesh(platform="gpu", device_kind="T4", compute_capability="7.5")


@pytest.fixture(autouse=True)
def jax_triton(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax_triton", ModuleType("jax_triton"))


def test_by_itself_kv_has_the_models_dtype():
    assert resolve_kv_dtype("auto", np.float16, CPU) == np.float16


@pytest.mark.parametrize("devices", [CPU, A100, L4, T4])
def test_int8_is_int8(devices):
    assert resolve_kv_dtype("int8", np.float32, devices) == np.int8


@pytest.mark.parametrize("devices", [CPU, A100, L4])
def test_float8_is_held_as_bits(devices):
    assert resolve_kv_dtype("fp8", np.float32, devices) == np.uint8


def test_a_gpu_without_float8_needs_the_triton_kernels_for_it(monkeypatch):
    with pytest.raises(ValueError, match=r"kv_cache_dtype='fp8': T4 of compute capability 7.5 has no float8"):
        resolve_kv_dtype("fp8", np.float32, T4)
    monkeypatch.setitem(sys.modules, "jax_triton", None)
    with pytest.raises(ValueError, match=r"A100 of compute capability 8.0 has no float8"):
        resolve_kv_dtype("fp8", np.float32, A100)
    assert resolve_kv_dtype("fp8", np.float32, L4) == np.uint8
