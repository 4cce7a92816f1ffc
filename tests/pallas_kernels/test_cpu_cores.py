"""Threads are as many as the cores that a process may use, by its affinity and by its cgroups' quotas."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest

from pallas_kernels import cpu_cores
from pallas_kernels.cpu_cores import VARIABLE, limit_threads, num_cores, physical, quota


def system(root, cgroup, files):
    """A system's folders with this process's cgroups and the files of their limits."""
    for name, text in {"proc/self/cgroup": cgroup, **files}.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


@pytest.mark.parametrize(
    ("cgroup", "files", "cores"),
    [
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "200000 100000\n"}, 2.0),
        ("0::/\n", {"sys/fs/cgroup/cpu.max": "max 100000\n"}, math.inf),
        ("0::/a/b\n", {"sys/fs/cgroup/a/cpu.max": "150000 100000", "sys/fs/cgroup/a/b/cpu.max": "max 100000"}, 1.5),
        ("0::/a/b\n", {"sys/fs/cgroup/a/cpu.max": "900 100", "sys/fs/cgroup/a/b/cpu.max": "700 100"}, 7.0),
        (
            "5:cpuset:/x\n4:cpu,cpuacct:/docker/1\n",
            {
                "sys/fs/cgroup/cpu/docker/1/cpu.cfs_quota_us": "300000",
                "sys/fs/cgroup/cpu/docker/1/cpu.cfs_period_us": "100000",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            },
            3.0,
        ),
        ("8:pids:/\n", {}, math.inf),
        ("0::/gone\n", {"sys/fs/cgroup/cpu.max": "nonsense"}, math.inf),
    ],
)
def test_the_least_quota_of_all_cgroups_around_counts(tmp_path, cgroup, files, cores):
    assert quota(system(tmp_path, cgroup, files)) == cores


def test_a_system_without_cgroups_has_no_quota(tmp_path):
    assert quota(tmp_path) == math.inf


@pytest.mark.parametrize("name", ["core_cpus_list", "thread_siblings_list"])
def test_virtual_processors_of_one_core_count_once(tmp_path, name):
    topology = "sys/devices/system/cpu/cpu{}/topology/" + name
    files = {topology.format(number): f"{number % 4},{number % 4 + 4}\n" for number in range(8)}
    root = system(tmp_path, "0::/\n", files)
    assert physical(root, range(8)) == 4
    assert physical(root, {0, 4, 1}) == 2  # a process that may run on some of them
    assert physical(root, {0, 9}) == 2  # one that the system tells nothing of


@pytest.fixture
def half_a_core_more_than_one(monkeypatch):
    monkeypatch.setattr(cpu_cores, "quota", lambda root: 1.5)
    monkeypatch.setattr(cpu_cores, "_seen", lambda: set(range(8)))
    monkeypatch.delenv(VARIABLE, raising=False)
    num_cores.cache_clear()
    yield
    num_cores.cache_clear()


def test_a_part_of_a_core_counts_as_one_and_a_users_number_is_kept(half_a_core_more_than_one, monkeypatch):
    assert num_cores() == 2
    limit_threads()
    assert os.environ[VARIABLE] == "2"
    monkeypatch.setenv(VARIABLE, "5")
    limit_threads()
    assert os.environ[VARIABLE] == "5"


@pytest.mark.skipif(sys.platform != "linux", reason="reads the names of threads from /proc")
def test_xla_starts_so_many_threads():
    program = (
        "import glob, jax; jax.numpy.zeros(8).block_until_ready(); "
        "print([open(f).read().strip() for f in glob.glob('/proc/self/task/*/comm')].count('tf_XLAEigen'))"
    )
    environment = os.environ | {VARIABLE: "3", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    found = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "3"
