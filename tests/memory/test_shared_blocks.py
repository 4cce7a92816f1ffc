"""Images' features in the pool: whoever holds them shares them, and an image is cached and evicted as a whole."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from memory_pools import run
from thorough import examples

from jpaged.memory import Fit, FullAttention, GroupSpec, ImageFeatures, MemoryManager, Need, PoolLayout

SIZE = 4
"""Tokens, or features, of a block."""


def manager(num_pages=8, **options):
    """Full attention of two blocks a large page (group 0), and images of one (group 1)."""
    specs = [
        GroupSpec("full", layer_bytes=4, num_layers=1, block_size=SIZE, policy=FullAttention()),
        GroupSpec("images", layer_bytes=8, num_layers=1, block_size=SIZE, policy=ImageFeatures()),
    ]
    return MemoryManager(PoolLayout.plan(specs, 8 * num_pages), **{"prefix_caching": True, **options})


def hold(memory, name, features=10):
    """Hold an image and have it encoded if need be; returns (hold, how many were encoded)."""
    held = memory.shared["images"].hold(name, features)
    pending = memory.shared["images"].take_pending()
    for image in pending:
        memory.shared["images"].encoded(image)
    return held, len(pending)


def counts(memory):
    """(used, evictable) blocks of images."""
    memory.check_invariants()
    group = memory.report().groups[1]
    return group.used, group.evictable


def test_an_image_is_encoded_once_and_its_blocks_are_shared():
    memory = manager()
    first, encoded = hold(memory, b"cat")
    assert encoded == 1 and counts(memory) == (3, 0)
    second, encoded = hold(memory, b"cat")
    assert encoded == 0 and second.blocks == first.blocks and counts(memory) == (3, 0)
    other, encoded = hold(memory, b"dog")
    assert encoded == 1 and not set(other.blocks) & set(first.blocks)
    report = memory.report().groups[1]
    assert report.token_bytes == 20 * 2 and report.blocks_saved == 3
    for held in (first, second, other):
        memory.shared["images"].release(held)
    assert counts(memory) == (0, 6)
    assert hold(memory, b"cat")[1] == 0


def test_consumed_features_are_given_up_block_by_block_and_the_image_stays_findable():
    memory = manager()
    held, _ = hold(memory, b"cat")
    memory.shared["images"].consumed(held, 3)
    assert counts(memory) == (3, 0)
    memory.shared["images"].consumed(held, 9)
    assert counts(memory) == (1, 2)
    again, encoded = hold(memory, b"cat")
    assert encoded == 0 and counts(memory) == (3, 0)
    memory.shared["images"].release(held)
    memory.shared["images"].release(again)
    assert counts(memory) == (0, 3)


def test_an_image_is_evicted_as_a_whole_and_the_least_recently_needed_one_first():
    memory = manager(num_pages=6)
    for name in (b"cat", b"dog"):
        memory.shared["images"].release(hold(memory, name)[0])
    memory.shared["images"].release(hold(memory, b"cat")[0])  # the dog is the older one now
    memory.add(0, 0)
    run(memory, 0, [1])
    assert counts(memory) == (0, 3), "one page was needed, and two blocks of the dog are of no use to anybody"
    assert memory.shared["images"].holds_content(b"cat") and not memory.shared["images"].holds_content(b"dog")
    memory.free(0)


def test_blocks_of_one_image_have_one_time_however_they_were_given_up():
    memory = manager()
    held, _ = hold(memory, b"cat")
    memory.shared["images"].consumed(held, 8)
    memory.shared["images"].release(hold(memory, b"dog")[0])
    memory.shared["images"].release(held)
    evictable = memory.parts.allocator.groups[1].evictable
    assert len({evictable[block] for block in held.blocks}) == 1
    assert list(evictable)[:3] != sorted(held.blocks), "the cat was needed after the dog"


def test_an_image_that_loses_its_first_blocks_while_it_is_read_is_found_no_more():
    memory = manager(num_pages=3)
    held, _ = hold(memory, b"cat")
    memory.shared["images"].consumed(held, 8)
    memory.add(0, 0)
    run(memory, 0, list(range(12)))  # takes the two pages
    assert not memory.shared["images"].holds_content(b"cat") and counts(memory) == (1, 0)
    assert memory.shared["images"].hold(b"cat", 10) is None, "it would have to be encoded again, and there is no room"
    memory.shared["images"].release(held)
    assert counts(memory) == (0, 0)
    memory.free(0)


def test_a_hold_given_up_before_the_encoder_ran_takes_the_encoding_back():
    memory = manager()
    held = memory.shared["images"].hold(b"cat", 10)
    again = memory.shared["images"].hold(b"cat", 10)
    memory.shared["images"].release(held)
    assert memory.shared["images"].holds_content(b"cat")
    memory.shared["images"].release(again)
    assert memory.shared["images"].take_pending() == [] and counts(memory) == (0, 0)


def test_without_prefix_caching_an_image_is_gone_with_its_last_user():
    memory = manager(prefix_caching=False)
    held, _ = hold(memory, b"cat")
    other, _ = hold(memory, b"cat")
    memory.shared["images"].consumed(held, 10)
    memory.shared["images"].release(held)
    assert counts(memory) == (3, 0)
    memory.shared["images"].consumed(other, 4)
    assert not memory.shared["images"].holds_content(b"cat") and counts(memory) == (2, 0)
    memory.shared["images"].release(other)
    assert counts(memory) == (0, 0)


def test_admission_counts_the_largest_image_and_the_tokens():
    memory = manager(num_pages=4, watermark=0.0)
    assert memory.can_admit(Need(8, held_blocks=[0, 3])) is Fit.OK
    assert memory.can_admit(Need(9, held_blocks=[0, 3])) is Fit.NEVER
    assert memory.can_admit(Need(8, held_blocks=[0, 4])) is Fit.NEVER


@settings(max_examples=examples(60), deadline=None)
@given(data=st.data())
def test_nothing_is_lost_or_freed_while_in_use(data):
    memory = manager(num_pages=6, prefix_caching=data.draw(st.booleans()))
    held, running = [], 0
    for _ in range(data.draw(st.integers(1, 40))):
        what = data.draw(st.sampled_from(["hold", "consume", "release", "run", "free"]))
        if what == "hold":
            name = data.draw(st.sampled_from([b"a", b"b", b"c"]))
            got, _ = hold(memory, name, {b"a": 3, b"b": 10, b"c": 17}[name])
            held += [] if got is None else [got]
        elif what == "consume" and held:
            one = data.draw(st.sampled_from(held))
            memory.shared["images"].consumed(one, data.draw(st.integers(0, one.image.features)))
        elif what == "release" and held:
            memory.shared["images"].release(held.pop(data.draw(st.integers(0, len(held) - 1))))
        elif what == "run":
            memory.add(running, running)
            tokens = [running] * data.draw(st.integers(1, 12))
            if memory.allocate(running, len(tokens), first_write=0) is not None:
                memory.commit(running, tokens, len(tokens))
            memory.free(running)
            running += 1
        memory.check_invariants()
        in_use = [set(one.blocks[one.given :]) for one in held]
        by_name = {one.image: blocks for one, blocks in zip(held, in_use, strict=True)}
        for image, blocks in by_name.items():
            assert not any(blocks & others for other, others in by_name.items() if other is not image)
    for one in held:
        memory.shared["images"].release(one)
    memory.check_invariants()
    assert memory.num_used_blocks == 0 and memory.reset_prefix_cache()
    assert memory.num_available_pages == 6
