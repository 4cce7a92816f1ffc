"""Which kernels run where, and what is said about it."""

import logging
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import jax
import pytest

from pallas_kernels import platform
from pallas_kernels.platform import resolve_impl, why_no_triton


@pytest.fixture
def gpu(monkeypatch):
    """Make JAX's default backend a GPU of some compute capability."""

    def pretend(capability):
        device = SimpleNamespace(device_kind="Some GPU", compute_capability=capability)
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        monkeypatch.setattr(jax, "devices", lambda: [device])

    platform._impl_of_gpu.cache_clear()
    yield pretend
    platform._impl_of_gpu.cache_clear()


@pytest.fixture
def jax_triton(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax_triton", ModuleType("jax_triton"))


@pytest.fixture
def no_jax_triton(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax_triton", None)


def test_this_platform_has_a_default():
    assert resolve_impl(None) in ("cpu", "tpu", "gpu")


def test_an_implementation_that_is_named_is_taken():
    assert resolve_impl("reference") == "reference"
    assert resolve_impl("gpu") == "gpu"


def test_an_unknown_implementation_is_refused():
    with pytest.raises(ValueError, match="'cuda'"):
        resolve_impl("cuda")


def test_without_numba_the_cpu_runs_xla_and_says_so_once(monkeypatch, caplog):
    monkeypatch.setattr(platform, "find_spec", lambda name: None)
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    platform._impl_of_cpu.cache_clear()
    try:
        assert [resolve_impl(None), resolve_impl(None)] == ["xla", "xla"]
    finally:
        platform._impl_of_cpu.cache_clear()
    assert caplog.messages == ["kernels of the CPU: XLA, about half as fast in decoding, as numba is not installed"]


@pytest.mark.usefixtures("jax_triton")
@pytest.mark.parametrize("capability", ["7.5", "8.0", "8.9", "9.0", "10.0", "12.0"])
def test_a_gpu_with_jax_triton_runs_the_triton_kernels_and_says_so_once(gpu, caplog, capability):
    gpu(capability)
    with caplog.at_level(logging.INFO, logger="pallas_kernels"):
        assert [resolve_impl(None), resolve_impl(None)] == ["gpu", "gpu"]
    assert caplog.messages == ["kernels of Some GPU: Triton, through jax-triton"]


@pytest.mark.usefixtures("jax_triton")
@pytest.mark.parametrize("value", [None, "", "xla"])
def test_a_gpu_runs_the_xla_path_until_triton_is_asked_for(gpu, caplog, monkeypatch, value):
    monkeypatch.delenv(platform.GPU_SWITCH)
    if value is not None:
        monkeypatch.setenv(platform.GPU_SWITCH, value)
    gpu("9.0")
    assert resolve_impl(None) == "xla"
    said = "kernels of Some GPU: XLA, as no GPU has run the Triton kernels yet: PALLAS_KERNELS_GPU=triton takes them"
    assert caplog.messages == [said]


def test_another_value_of_the_switch_is_refused(gpu, monkeypatch):
    monkeypatch.setenv(platform.GPU_SWITCH, "cuda")
    gpu("9.0")
    with pytest.raises(ValueError, match="PALLAS_KERNELS_GPU='cuda' is not 'xla' or 'triton'"):
        resolve_impl(None)


@pytest.mark.usefixtures("jax_triton")
def test_an_older_gpu_runs_the_xla_path_and_says_why_once(gpu, caplog):
    gpu("7.0")
    assert [resolve_impl(None), resolve_impl(None)] == ["xla", "xla"]
    assert caplog.messages == ["kernels of Some GPU: XLA, as compute capability 7.0 is below 7.5"]


@pytest.mark.usefixtures("no_jax_triton")
def test_a_gpu_without_jax_triton_runs_the_xla_path_and_says_why(gpu, caplog):
    gpu("9.0")
    assert resolve_impl(None) == "xla"
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("kernels of Some GPU: XLA, as jax-triton cannot be imported")


@pytest.mark.usefixtures("jax_triton")
def test_a_gpu_that_is_not_nvidias_runs_the_xla_path():
    assert why_no_triton("gfx942") == "as compute capability 'gfx942' is not an NVIDIA GPU's"
    assert why_no_triton("9.0") is None


def test_importing_the_kernels_imports_no_triton():
    """Neither is installed beside a CPU's or TPU's JAX."""
    program = "import sys, pallas_kernels.paged_attention, pallas_kernels.kv_write, pallas_kernels.block_copy\n"
    program += "sys.exit(bool({'triton', 'jax_triton'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
