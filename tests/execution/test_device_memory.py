"""How many bytes the pool gets."""

from __future__ import annotations

from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from jpaged.execution import device_memory, make_mesh
from jpaged.execution.device_memory import GPU_SHARE, VARIABLES, claim_gpu_share, gpu_share

MIB, GIB = 1 << 20, 1 << 30


def ask(mesh, **changes) -> int:
    options = {
        "requested": None,
        "memory_utilization": 0.5,
        "temporary_bytes": GIB,
        "useful_bytes": 1 << 50,
        **changes,
    }
    return device_memory.pool_bytes(device_memory.device_memory(mesh, {"w": jnp.zeros(1000)}), **options)


@pytest.fixture
def cpu(monkeypatch):
    monkeypatch.setattr(device_memory, "host_memory_available", lambda: 6 * GIB)
    return make_mesh(1)


@pytest.fixture
def accelerator(monkeypatch):
    """A device of 16 GiB of which 3 are in use."""
    monkeypatch.setattr(device_memory, "platform", lambda mesh: "gpu")
    stats = {"bytes_limit": 16 * GIB, "bytes_in_use": 3 * GIB}
    device = SimpleNamespace(memory_stats=lambda: stats)
    return SimpleNamespace(local_devices=[device])


def test_what_was_requested_is_taken_as_it_is(cpu):
    assert ask(cpu, requested=12345, useful_bytes=1) == 12345


@pytest.mark.parametrize(("device", "free"), [("cpu", 6 * GIB), ("accelerator", 13 * GIB)])
def test_a_request_of_more_than_is_free_is_refused_with_both_numbers(device, free, request):
    mesh = request.getfixturevalue(device)
    assert ask(mesh, requested=free) == free
    with pytest.raises(ValueError, match=f"kv_cache_memory_bytes={free + 1:,} does not fit .* {free:,} bytes free"):
        ask(mesh, requested=free + 1)


def test_on_cpu_a_small_part_of_the_free_memory_within_memory_utilization(cpu):
    assert ask(cpu) == 6 * GIB // device_memory.CPU_POOL_PART
    assert ask(cpu, memory_utilization=0.05) == int(0.05 * 6 * GIB)


def test_on_cpu_a_little_more_or_less_free_memory_gives_the_same_pool(cpu, monkeypatch):
    def pool_of(free: int) -> int:
        monkeypatch.setattr(device_memory, "host_memory_available", lambda: free)
        return ask(cpu)

    sizes = [pool_of(free) for free in range(4 * GIB, 16 * GIB, 123_456_789)]
    assert set(sizes) == {GIB // 2, 3 * GIB // 4, GIB, 3 * GIB // 2}, "one size for each half of a power of two"
    assert sizes == sorted(sizes)
    assert all(free / 12.01 < pool_of(free) <= free / 8 for free in range(4 * GIB, 16 * GIB, 123_456_789))


def test_on_cpu_room_for_one_sequence_even_where_that_is_a_large_part_up_to_the_limit(cpu):
    assert ask(cpu, sequence_bytes=2 * GIB) == 2 * GIB
    assert ask(cpu, sequence_bytes=5 * GIB) == 3 * GIB  # half of what is free
    assert ask(cpu, sequence_bytes=5 * GIB, memory_utilization=0.9) == device_memory.CPU_POOL_LIMIT


def test_no_more_than_is_useful(cpu):
    assert ask(cpu, useful_bytes=777) == 777


def test_on_accelerators_weights_and_temporaries_count_too(accelerator):
    assert ask(accelerator, memory_utilization=0.75) == (12 - 3 - 1) * GIB


def test_no_room_is_an_error_with_the_numbers(accelerator):
    with pytest.raises(ValueError, match=f"memory_utilization=0.2 of {16 * GIB:,} bytes, {3 * GIB:,} in use"):
        ask(accelerator, memory_utilization=0.2)


def test_free_host_memory_is_known_here():
    assert 1 << 20 < device_memory.host_memory_available() < 1 << 50


MACHINE = {"proc/meminfo": "MemFree: 1 kB\nMemAvailable:   67108864 kB\n", "proc/self/status": "RssFile:  1024 kB\n"}
"""A machine with 64 GiB free, on which this process has mapped a mebibyte of files."""
VERSION_1 = {"limit_in_bytes": 4 * GIB, "usage_in_bytes": GIB, "stat": "active_file 7\ntotal_active_file 1048576\n"}


@pytest.mark.parametrize(
    ("cgroup", "files", "free"),
    [
        ("0::/\n", {}, 64 * GIB),
        ("0::/\n", {"memory.max": "max\n", "memory.current": GIB, "memory.stat": ""}, 64 * GIB),
        ("0::/\n", {"memory.max": 2 * GIB, "memory.current": GIB, "memory.stat": "inactive_file 1048576\n"}, GIB + MIB),
        (
            "0::/a/b\n",
            {"a/memory.max": 3 * GIB, "a/memory.current": GIB, "a/memory.stat": "", "a/b/memory.max": "max"},
            2 * GIB,
        ),
        ("4:memory:/x\n", {f"memory/x/memory.{name}": text for name, text in VERSION_1.items()}, 3 * GIB + MIB),
        ("0::/\n", {"memory.max": GIB, "memory.current": GIB, "memory.stat": ""}, MIB),
    ],
)
def test_a_container_has_no_more_free_memory_than_its_limit_leaves(cgroup, files, free, tmp_path):
    texts = {**MACHINE, "proc/self/cgroup": cgroup, **{f"sys/fs/cgroup/{name}": text for name, text in files.items()}}
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(str(text))
    assert device_memory.host_memory_available(tmp_path) == free - MIB


def test_device_bytes_counts_one_shard():
    assert device_memory.device_bytes({"a": jnp.zeros((3, 5)), "b": [jnp.zeros(2, jnp.bfloat16)]}) == 64


# The share of a GPU that JAX is asked to take.


def test_the_engine_asks_for_more_than_xlas_default():
    environment: dict[str, str] = {}
    claim_gpu_share(environment)
    assert environment == {"XLA_CLIENT_MEM_FRACTION": str(GPU_SHARE)}
    assert gpu_share(environment) == GPU_SHARE > 0.75


@pytest.mark.parametrize("name", VARIABLES)
def test_a_users_choice_stays_and_counts(name):
    environment = {name: "0.5"}
    claim_gpu_share(environment)
    assert environment == {name: "0.5"}  # XLA refuses both names at once
    assert gpu_share(environment) == 0.5
