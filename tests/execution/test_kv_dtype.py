"""What a pool of one byte a value is held in, and on which devices."""

import sys
from types import ModuleType, SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from jpaged.execution.kv_dtype import resolve_kv_dtype, rows_tile


def mesh(**device):
    return SimpleNamespace(devices=np.array([SimpleNamespace(**device)]))


CPU = mesh(platform="cpu", device_kind="cpu")
A100 = mesh(platform="gpu", device_kind="A100", compute_capability="8.0")
L4 = mesh(platform="gpu", device_kind="L4", compute_capability="8.9")
V5E = mesh(platform="tpu", device_kind="TPU v5 lite")
TPU7X = mesh(platform="tpu", device_kind="TPU7x")
T4 = mesh(platform="gpu", device_kind="T4", compute_capability="7.5")
MI300 = mesh(platform="gpu", device_kind="MI300X", compute_capability="gfx942")


@pytest.fixture(autouse=True)
def jax_triton(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax_triton", ModuleType("jax_triton"))


def test_by_itself_kv_has_the_models_dtype():
    assert resolve_kv_dtype("auto", np.float16, CPU, 16) == np.float16


def test_bfloat16_stands_beside_any_dtype_on_a_cpu_and_beside_itself_elsewhere():
    assert resolve_kv_dtype("bfloat16", np.float32, CPU, 16) == np.uint16
    assert resolve_kv_dtype("bfloat16", jnp.bfloat16, A100, 16) == jnp.bfloat16
    with pytest.raises(ValueError, match="kv_cache_dtype='bfloat16' with dtype='float16' is for CPUs"):
        resolve_kv_dtype("bfloat16", np.float16, T4, 16)


@pytest.mark.parametrize("devices", [CPU, A100, L4, T4])
def test_int8_is_int8(devices):
    assert resolve_kv_dtype("int8", np.float32, devices, 16) == np.int8


@pytest.mark.parametrize("devices", [CPU, A100, L4, T4, MI300])
def test_float8_is_held_as_bits(devices):
    assert resolve_kv_dtype("fp8", np.float32, devices, 16) == np.uint8


def test_a_gpu_without_float8_needs_the_triton_kernels_for_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax_triton", None)
    with pytest.raises(ValueError, match=r"kv_cache_dtype='fp8': T4 of compute capability 7.5 has no float8"):
        resolve_kv_dtype("fp8", np.float32, T4, 16)
    with pytest.raises(ValueError, match=r"A100 of compute capability 8.0 has no float8"):
        resolve_kv_dtype("fp8", np.float32, A100, 16)
    assert resolve_kv_dtype("fp8", np.float32, L4, 16) == np.uint8


@pytest.mark.parametrize(("asked", "block_size"), [("auto", 8), ("int8", 32), ("int8", 128), ("fp8", 32)])
def test_a_tpu_with_float8_holds_any(asked, block_size):
    found = resolve_kv_dtype(asked, np.float32, TPU7X, block_size)
    assert found == {"auto": np.float32, "int8": np.int8, "fp8": np.uint8}[asked]


@pytest.mark.parametrize(
    ("asked", "block_size", "why"),
    [
        ("auto", 24, "block_size=24 is not a multiple of 16, the tile of float16"),
        ("int8", 16, "block_size=16 is not a multiple of 32, the tile of int8"),
        ("int8", 96, "block_size=96 is not 32, 64 or 128"),
        ("fp8", 32, "kv_cache_dtype='fp8': TPU v5 lite has no float8"),
    ],
)
def test_a_tpu_refuses_blocks_that_split_a_tile_and_float8_that_it_lacks(asked, block_size, why):
    with pytest.raises(ValueError, match=why):
        resolve_kv_dtype(asked, np.float16, V5E, block_size)


def test_only_a_tpus_blocks_are_whole_tiles():
    assert [rows_tile(devices) for devices in (V5E, A100, CPU)] == [8, 1, 1]
