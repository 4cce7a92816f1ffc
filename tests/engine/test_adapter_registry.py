"""Adapters in host memory: how many stay, what is read again, and what a changed or missing folder does."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, Lock

import pytest
from lora_checkpoints import save_all

from jpaged import LLM, LoRARequest
from jpaged.execution.caches.adapters import AdapterCache
from jpaged.loading.load import load_model
from jpaged.loading.lora import AdapterRegistry
from jpaged.loading.lora.peft import read_peft_folder
from jpaged.memory.tiers import HostMemory


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory):
    """A model, the layers that keep its adapters, and the folders of three."""
    model, adapters = save_all("llama", tmp_path_factory.mktemp("lora"))
    with LLM(model, enable_lora=True, max_lora_rank=6, block_size=8, max_model_len=64, max_num_seqs=2) as llm:
        caches = llm.control.engine.runner.spec.caches
    (cache,) = (cache for cache in caches if isinstance(cache, AdapterCache))
    return (load_model(Path(model)), cache), adapters


@pytest.fixture
def parts(served):
    return served[0]


@pytest.fixture
def folders(served, tmp_path: Path) -> dict[str, str]:
    """Copies of the adapters' folders, which a test may change."""
    return {name: shutil.copytree(folder, tmp_path / name).as_posix() for name, folder in served[1].items()}


def names_held(registry: AdapterRegistry, folders: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the adapters of which no folder has to be read."""
    found = []
    with monkeypatch.context() as patch:
        patch.setattr("jpaged.loading.lora.registry.read_peft_folder", refuse)
        for name in folders:
            try:
                registry.find(name)
            except ValueError:
                continue
            found.append(name)
    return found


def refuse(folder: str):
    raise ValueError(f"{folder} is not to be read")


def test_adapters_that_requests_use_stay_and_others_go_least_recently_asked_for_first(
    parts, folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
):
    host = HostMemory()
    registry = AdapterRegistry(*parts, folders, host, 2)
    one, two, three = folders
    assert names_held(registry, folders, monkeypatch) == [two, three]
    used = registry.find(two)
    registry.find(one)
    assert names_held(registry, folders, monkeypatch) == [one, two]
    also = registry.find(one)
    assert registry.find(three).name == three, "a request is served however many adapters others use"
    assert names_held(registry, folders, monkeypatch) == [one, two]
    assert host.adapters == used.blocks.nbytes + also.blocks.nbytes
    del used
    assert registry.find(three).blocks.nbytes + also.blocks.nbytes == host.adapters
    assert names_held(registry, folders, monkeypatch) == [one, three]


def test_half_of_the_host_memory_that_blocks_are_kept_in_bounds_the_adapters_without_requests(
    parts, folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
):
    sizes = AdapterRegistry(*parts, folders, HostMemory())
    each = {name: sizes.find(name).blocks.nbytes for name in folders}
    _, two, three = folders
    host = HostMemory(2 * (each[two] + each[three]))
    registry = AdapterRegistry(*parts, folders, host)
    assert names_held(registry, folders, monkeypatch) == [two, three]
    assert host.adapters == each[two] + each[three] == host.taken
    used = registry.find(three)
    assert host.for_swapped == host.limit - each[three], "the other one gives way"
    host.leave_swapped(host.limit - each[three])
    assert host.adapters == each[three] and host.taken == host.limit
    del used
    assert host.for_swapped == host.limit
    host.leave_swapped(host.limit)
    assert host.adapters == 0


def test_two_names_of_one_content_share_it(parts, folders: dict[str, str], tmp_path: Path):
    name = next(iter(folders))
    twin = shutil.copytree(folders[name], tmp_path / "twin").as_posix()
    host = HostMemory()
    registry = AdapterRegistry(*parts, {name: folders[name], "twin": twin}, host)
    first, second = registry.find(name), registry.find("twin")
    assert (first.name, second.name, host.adapters) == (name, "twin", first.blocks.nbytes)
    assert first.blocks is second.blocks and first.salt != second.salt


def test_of_two_folders_that_get_one_new_name_at_once_the_second_is_refused(
    parts, folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
):
    registry = AdapterRegistry(*parts, {}, HostMemory())
    one, two, _ = folders.values()
    both_asked, reads = Barrier(2), []

    def read_late(folder: str):
        reads.append(folder)
        both_asked.wait(60)
        return read_peft_folder(folder)

    class Waits:  # for the lock under which folders are read; the second to come has looked for the name before
        def __init__(self) -> None:
            self.lock = Lock()

        def __enter__(self) -> None:
            if not self.lock.acquire(blocking=False):
                both_asked.wait(60)
                self.lock.acquire()

        def __exit__(self, *_: object) -> None:
            self.lock.release()

    monkeypatch.setattr(registry, "_reading", Waits())
    monkeypatch.setattr("jpaged.loading.lora.registry.read_peft_folder", read_late)
    with ThreadPoolExecutor(2) as threads:
        asked = [threads.submit(registry.find, LoRARequest("new", 1, folder)) for folder in (one, two)]
    (refused,) = (error for found in asked if (error := found.exception()) is not None)
    other = two if reads == [one] else one
    assert str(refused) == f"lora_path='{other}': the adapter 'new' was read from {reads[0]}; choose another name"


def test_an_adapter_that_was_let_go_while_the_lock_was_held_is_dropped_once_it_is_not(parts, folders: dict[str, str]):
    host = HostMemory()
    registry = AdapterRegistry(*parts, folders, host, 1)
    used = {name: registry.find(name) for name in folders}
    *_, last = (adapter.blocks.nbytes for adapter in used.values())
    with registry._locked():  # as where Python collects garbage in a thread that holds it
        used.clear()
        assert host.adapters > last
    assert host.adapters == last


def test_a_dropped_adapter_whose_folder_changed_or_is_gone_is_refused_and_no_other_is(parts, folders: dict[str, str]):
    one, two, three = folders
    registry = AdapterRegistry(*parts, folders, HostMemory(), 1)
    shutil.rmtree(folders[one])
    with pytest.raises(ValueError, match=f"'{one}' was dropped from host memory .* cannot be read again: .* no folder"):
        registry.find(one)
    shutil.copytree(folders[two], folders[one])
    with pytest.raises(ValueError, match=f"'{one}' was dropped .* another content now .* choose another name"):
        registry.find(LoRARequest(one, 1, folders[one]))
    with pytest.raises(ValueError, match=f"lora_path='{folders[one]}': the adapter '{two}' was read from"):
        registry.find(LoRARequest(two, 1, folders[one]))
    assert registry.find(three).name == three and registry.find(two).name == two
