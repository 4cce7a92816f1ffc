"""The bound on the cached bytes of each salt: never exceeded, and never at the price of another salt."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_pools import full_manager, run, window_manager
from test_retention import cached, found, priority
from thorough import examples

from jpaged.memory.hash_chain import tenant_of
from jpaged.memory.saving import memory_data
from jpaged.memory.saving.saved_memory import load_memory


def num_bytes(manager) -> dict[bytes, int]:
    """Cached bytes without an owner by tenant, counted from the pool."""
    counted: dict[bytes, int] = {}
    for g, group in enumerate(manager.parts.allocator.groups):
        for block in [*group.evictable, *group.protected]:
            tenant = manager.parts.cache.link(g, block).tenant
            if tenant:
                counted[tenant] = counted.get(tenant, 0) + manager.layout.groups[g].block_bytes
    return counted


def test_a_salt_over_its_limit_loses_its_own_tails_and_others_nothing():
    manager = full_manager(20, prefix_caching=True, cache_salt_bytes=24)  # three blocks
    cached(manager, 0, [1] * 12, salt="a")
    cached(manager, 1, [2] * 16, salt="b")
    cached(manager, 2, [3] * 40)
    assert (found(manager, [1] * 12, salt="a"), found(manager, [2] * 16, salt="b")) == (12, 12)
    assert found(manager, [3] * 40) == 40  # prompts without a salt have no limit
    cached(manager, 3, [4] * 8, salt="a")
    assert (found(manager, [1] * 12, salt="a"), found(manager, [4] * 8, salt="a")) == (4, 8)
    assert found(manager, [2] * 16, salt="b") == 12


def test_what_requests_hold_counts_once_they_end():
    manager = full_manager(20, prefix_caching=True, cache_salt_bytes=16)
    manager.add(0, 0)
    manager.match_prefix(0, [1] * 16, salt="a")
    run(manager, 0, [1] * 16)
    assert found(manager, [1] * 16, salt="a") == 16
    manager.free(0)
    assert found(manager, [1] * 16, salt="a") == 8
    assert manager.parts.allocator.watch.num_bytes() == {tenant_of("a"): 16}


def test_an_adapter_of_a_salt_counts_for_the_salt():
    manager = full_manager(20, prefix_caching=True, cache_salt_bytes=16)
    cached(manager, 0, [1] * 8, salt=("a", "adapter"))
    cached(manager, 1, [1] * 8, salt="a")
    assert found(manager, [1] * 8, salt=("a", "adapter")) == 0 and found(manager, [1] * 8, salt="a") == 8


def test_within_a_salt_the_lowest_priority_goes_first():
    manager = full_manager(20, prefix_caching=True, cache_salt_bytes=16)
    cached(manager, 0, [1] * 8, priority(80), salt="a")
    cached(manager, 1, [2] * 8, salt="a")
    assert found(manager, [1] * 8, salt="a") == 8 and found(manager, [2] * 8, salt="a") == 0


def test_a_limit_below_a_block_is_refused():
    with pytest.raises(ValueError, match="cache_salt_bytes=7 is below the 8 bytes of one block"):
        full_manager(20, prefix_caching=True, cache_salt_bytes=7)


def test_a_restored_pool_keeps_to_the_limit_of_here():
    manager = full_manager(20, prefix_caching=True)
    cached(manager, 0, [1] * 40, salt="a")
    other = full_manager(20, prefix_caching=True, cache_salt_bytes=24)
    load_memory(other, memory_data(manager))
    other.check_invariants()
    assert found(other, [1] * 40, salt="a") == 12


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 3),
            st.integers(1, 20),
            st.sampled_from([None, "a", "b", "c"]),
            st.sampled_from([None, 0, 90]),
        ),
        max_size=25,
    ),
    st.sampled_from(["lru", "aligned", "predicted"]),
    st.booleans(),
    st.integers(0, 4),
)
def test_no_salt_ever_has_more_cached_than_the_limit_and_it_evicts_its_own(requests, order, windows, held):
    limit = 24
    make = window_manager if windows else full_manager
    manager = make(200, prefix_caching=True, prefix_eviction=order, cache_salt_bytes=limit)
    running: list[tuple[int, str | None]] = []
    for number, (name, length, salt, value) in enumerate(requests):
        tokens = [name] * length
        others = {tenant: count for tenant, count in num_bytes(manager).items() if tenant != tenant_of(salt)}
        manager.add(number, number, retention=None if value is None else priority(value))
        hit = manager.match_prefix(number, tokens, salt=salt)
        run(manager, number, tokens, hit)
        running.append((number, salt))
        if len(running) > held:
            ended, its = running.pop(0)
            others = {tenant: count for tenant, count in others.items() if tenant != tenant_of(its)}
            manager.free(ended)
        manager.check_invariants()
        now = num_bytes(manager)
        assert all(count <= limit for count in now.values())
        assert manager.parts.allocator.watch.num_bytes() == now
        assert all(now.get(tenant) == count for tenant, count in others.items())  # the pool is large enough for all
