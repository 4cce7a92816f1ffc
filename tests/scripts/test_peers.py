"""Other engines get the machine that jpaged has."""

import pytest

from scripts.benchmarks import peers
from scripts.benchmarks.peers import peer_variables


@pytest.fixture
def two_cores(monkeypatch):
    monkeypatch.setattr(peers.os, "sched_getaffinity", lambda process: {3, 1}, raising=False)
    monkeypatch.setattr(peers, "find_library", lambda name: None)


def test_vllm_computes_on_all_cores_that_this_process_may_use(two_cores, tmp_path):
    assert peer_variables("vllm", tmp_path) == {"OMP_NUM_THREADS": "2", "VLLM_CPU_OMP_THREADS_BIND": "1,3"}


def test_its_libraries_are_loaded_first_where_they_are_installed(two_cores, tmp_path, monkeypatch):
    threads = tmp_path / "lib" / "libiomp5.so"
    threads.parent.mkdir()
    threads.touch()
    assert peer_variables("vllm", tmp_path)["LD_PRELOAD"] == str(threads)
    monkeypatch.setattr(peers, "find_library", lambda name: f"lib{name}.so.4")
    assert peer_variables("vllm", tmp_path)["LD_PRELOAD"] == f"libtcmalloc_minimal.so.4:{threads}"


@pytest.mark.parametrize("name", ["openvino", "llamacpp"])
def test_engines_that_take_all_cores_by_themselves_are_left_alone(name, tmp_path):
    assert peer_variables(name, tmp_path) == {}
