"""A link names the salt and every token up to the end of its block."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from memory_pools import full_manager, run

from jpaged.memory import TokenSpan
from jpaged.memory.hash_chain import HashChain, in_common, last_end, may_end


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


# Blocks are named by the images in them, and no prefix ends within a whole one.

CAT, DOG = b"cat" * 11, b"dog" * 11
IDS = [1, 2, 9, 9, 9, 9, 9, 9, 3, 4, 5, 6]
"""Six tokens of an image from position 2."""


def names(digest, start=2, ids=IDS):
    chain = HashChain(4, spans=[TokenSpan(start, 6, digest, True)])
    chain.extend(ids, len(ids) // 4)
    return chain.links


def test_a_block_is_named_by_its_image_and_so_are_those_behind_it():
    assert names(CAT) == names(CAT)
    assert all(one != other for one, other in zip(names(CAT), names(DOG), strict=True))
    text = HashChain(4)
    text.extend(IDS, 3)
    assert names(CAT)[0] != text.links[0], "the same ids, no image"


def test_a_block_before_an_image_has_the_name_of_its_text():
    ids = [7, 7, 7, 7, *IDS[2:]]
    assert names(CAT, 4, ids)[0] == names(DOG, 4, ids)[0] and names(CAT, 4, ids)[1] != names(DOG, 4, ids)[1]


def test_another_part_of_the_same_image_is_something_else():
    ids = [9] * 8
    assert names(CAT, 0, ids)[0] != names(CAT, 1, ids)[0]


def test_a_fork_keeps_its_images():
    chain = HashChain(4, spans=[TokenSpan(2, 6, CAT, True)])
    twin = chain.copy()
    twin.extend(IDS, 3)
    assert twin.links == names(CAT)


def test_a_hit_ends_before_a_whole_image_that_it_would_cut():
    for whole, cached in ((True, 0), (False, 4)):
        memory = full_manager(prefix_caching=True)
        spans = [TokenSpan(2, 6, CAT, whole)]
        memory.add(0, 0)
        memory.match_prefix(0, IDS, spans=spans)
        run(memory, 0, IDS[:7])
        memory.free(0)
        memory.add(1, 1)
        assert memory.match_prefix(1, IDS, spans=spans) == cached
        assert memory.cached_prefix(IDS, spans=[TokenSpan(2, 6, DOG, whole)]) == 0
        memory.free(1)


SPANS = [TokenSpan(3, 4, CAT, True), TokenSpan(9, 2, DOG, True), TokenSpan(20, 5, CAT, False)]


@given(length=st.integers(0, 30), step=st.integers(1, 8))
def test_the_last_end_is_the_longest_that_may_be(length, step):
    ends = [end for end in range(0, length + 1, step) if may_end(end, SPANS)]
    assert last_end(length, SPANS, step) == max(ends)


def test_sequences_have_in_common_what_comes_before_the_first_image_that_differs():
    other = [SPANS[0], TokenSpan(9, 2, CAT, True)]
    assert in_common(SPANS, SPANS, 30) == 30
    assert in_common(SPANS, other, 30) == 9
    assert in_common(SPANS, SPANS[:2], 30) == 20
    assert in_common(SPANS, other, 5) == 5
