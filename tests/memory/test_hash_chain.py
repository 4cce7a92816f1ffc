"""A link names the salt and every token up to the end of its block."""

from __future__ import annotations

import numpy as np

from jpaged.memory.hash_chain import HashChain


def chain(tokens, size=2, salt=None) -> HashChain:
    result = HashChain(size, salt)
    result.extend(tokens, len(tokens) // size)
    return result


def test_links_depend_on_all_tokens_before_them():
    a, b = chain([1, 2, 3, 4]), chain([9, 2, 3, 4])
    assert a.links[1].tokens == b.links[1].tokens
    assert a.links[1].digest != b.links[1].digest


def test_salts_keep_equal_tokens_apart():
    digests = {chain([1, 2], salt=salt).links[0].digest for salt in (None, "a", "b", 1, "1", ("a", 1))}
    assert len(digests) == 6


def test_token_borders_matter():
    assert chain([1, 23]).links[0].digest != chain([12, 3]).links[0].digest
    assert chain([2**31]).links == [] and chain([2**31, -1]).links  # any id a tokenizer may have


def test_growing_a_chain_step_by_step_gives_the_same_links():
    tokens = list(range(9))
    grown = HashChain(2)
    for known in range(len(tokens) + 1):
        grown.extend(tokens[:known], known // 2)
    assert grown.links == chain(tokens).links
    assert chain(np.arange(9)).links == grown.links


def test_a_copy_grows_on_its_own():
    parent = chain([1, 2, 3, 4])
    child = parent.copy()
    child.extend([1, 2, 3, 4, 5, 6], 3)
    parent.extend([1, 2, 3, 4, 7, 8], 3)
    assert len(child.links) == len(parent.links) == 3
    assert child.links[:2] == parent.links[:2] and child.links[2] != parent.links[2]


def test_a_truncated_chain_takes_other_tokens():
    one = chain([1, 2, 3, 4])
    one.truncate(1)
    one.extend([1, 2, 5, 6], 2)
    assert one.links == chain([1, 2, 5, 6]).links
