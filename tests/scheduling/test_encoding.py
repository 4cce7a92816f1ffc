"""Images are encoded within the budget, read whole where they must be, and held no longer than they are needed."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from math import ceil

import numpy as np
import pytest
from arrivals import Arrival, serve
from fake_device import Loop
from fake_store import FakeStore
from hypothesis import given, settings
from hypothesis import strategies as st
from small_schedulers import group, make_request, make_scheduler
from thorough import examples
from unpaged import alone, feature

from jpaged.memory import Fit, GroupSpec, ImageFeatures, Need
from jpaged.memory.tiers import BreakEven
from jpaged.scheduling import tier_prefetch
from jpaged.scheduling.inputs import PromptItem, asks_for, joined

PIXEL = 9
"""Every image token's id."""
PATCHES = 4
"""Patches of each feature."""

SALTS, PICTURES = count(), [("cat", 9), ("dog", 6), ("cow", 5)]


def image_group(layer_bytes=8, stays=False, **cost):
    return GroupSpec("images", layer_bytes, 1, 4, ImageFeatures(stays=stays, **cost))


GROUPS = [group("full", layer_bytes=4), image_group()]
READERS = [group("full", layer_bytes=4), image_group(stays=True)]
"""The groups of a model whose tokens read images that stay; an image is one token of the prompt."""


def with_images(parts, max_tokens=4, whole=True, stays=False, **options):
    """A request; its parts are numbers of text tokens, and (name, size) of images."""
    tokens, images = [], []
    for part in parts:
        if isinstance(part, int):
            tokens += [(len(tokens) + i) % 7 for i in range(part)]
        else:
            name, size = part
            length = 1 if stays else size
            patches = {"pixels": np.zeros((PATCHES * size, 1), np.uint8)}
            images.append(
                PromptItem(len(tokens), length, f"{name} {size}".encode(), size, patches, whole and not stays)
            )
            tokens += [PIXEL] * length
    request = make_request(tokens, max_tokens, **options)
    request.asks = asks_for(joined(images) if stays else images)
    return request


def images_of(request):
    return request.asks.get("images", ())


def expected(request, groups, index=0, stays=False):
    """Return what the request generates alone: its tokens see the images."""
    if stays:
        return alone(request, groups, index=index, show=lambda at, token: shown_to(request, at, token))
    shown = list(request.prompt_token_ids)
    for image in images_of(request):
        shown[image.start : image.stop] = [feature(image.digest, i) for i in range(image.length)]
    return alone(replace(request, prompt_token_ids=shown), groups, index=index)


def shown_to(request, position, token):
    """A token with what it reads: of the images that come last before it, those not behind it."""
    last = [image for image in images_of(request) if image.start <= position][-1:]
    read = [part for image in last for part in image.each if part.start <= position]
    return (token, tuple(feature(part.digest, i) for part in read for i in range(part.features))) if read else token


def loop_of(num_pages=64, **options):
    defaults = {"groups": GROUPS, "prefix_caching": True, "budget": 32}
    return Loop(make_scheduler(num_pages, **(defaults | options)))


def costs(steps):
    """(tokens, features encoded) of each step."""
    return [(step.num_tokens, sum(encode.image.features for encode in step.work_of("encodes"))) for step in steps]


def test_an_image_is_encoded_in_the_step_that_reads_it_where_the_budget_holds_both():
    steps = loop_of().run(with_images([3, ("cat", 8), 5]))
    assert costs(steps)[0] == (16, 8) and len(steps[0].rows["images"]) == 1


def test_a_chunk_ends_before_an_image_that_the_budget_cannot_encode_and_goes_on_with_it():
    request = with_images([20, ("cat", 16), 3], 2)
    steps = loop_of().run(request)
    assert costs(steps)[:3] == [(20, 0), (16, 16), (3, 0)]
    assert request.sequences[0].output_token_ids == expected(request, GROUPS[:1])[0]


def test_an_image_that_fills_the_budget_is_encoded_first_and_read_in_the_next_step():
    steps = loop_of(max_num_seqs=1).run(with_images([("cat", 24), 3], 2))
    assert costs(steps)[:2] == [(0, 24), (27, 0)]


def test_an_image_larger_than_the_budget_takes_all_of_it_and_is_read_in_parts_unless_it_is_whole():
    request = with_images([("cat", 60)], 2, whole=False)
    steps = loop_of(max_num_seqs=1).run(request)
    assert [read.stop - read.start for step in steps for read in step.rows.get("images", ())] == [32, 28]
    assert request.sequences[0].output_token_ids == expected(request, GROUPS[:1])[0]
    with pytest.raises(ValueError, match=r"image 1 takes 60 tokens, which one step has to compute together, .* 25"):
        loop_of().run(with_images([("cat", 60)], 2))


@pytest.mark.parametrize(("work", "cost"), [(0.125, 6), (0.25, 12), (0.3, 15), (0.5, 24), (3.0, 25)])
def test_an_image_costs_what_its_encoder_computes_for_its_patches(work, cost):
    loop = loop_of(groups=[*GROUPS[:1], image_group(patches="pixels", work=work)])
    request = with_images([20, ("cat", 12), 3], 2)
    steps = [step for step in loop.run(request) if step.chunks or step.work]
    tokens = [(sum(c.length for c in step.chunks), len(step.work_of("encodes"))) for step in steps]
    if cost == 6:
        assert tokens[:2] == [(20, 0), (15, 1)], "the rest of the prompt fits, too"
    else:
        assert tokens[0] == (20, 0), "the image would not fit after the text"
        assert tokens[1] == ((min(15, 32 - cost), 1) if cost + 12 <= 32 else (0, 1))
    assert request.sequences[0].output_token_ids == expected(request, GROUPS[:1])[0]


def parts_of(steps):
    """The rounds that each step runs; None where it encodes nothing in part."""
    made = [[encode.part for encode in step.work_of("encodes")] for step in steps]
    assert all(len(parts) <= 1 for parts in made)
    return [parts[0][:2] if parts and parts[0] is not None else None for parts in made]


def in_parts(work=1.0, rounds=(1,) * 6):
    return [*GROUPS[:1], image_group(patches="pixels", work=work, rounds=rounds)]


def test_an_image_that_costs_more_than_a_step_is_encoded_over_several_while_streams_go_on():
    loop = loop_of(groups=in_parts(), max_num_seqs=4)
    streams = [with_images([3 + n], 12) for n in range(2)]
    for stream in streams:
        loop.scheduler.add(stream)
    loop.step()
    request = with_images([6, ("cat", 25), 3], 2)
    steps = loop.run(request)
    assert parts_of(steps)[:8] == [None, *((n, n + 1) for n in range(6)), None], "17 tokens each, of 32 less 2"
    assert all(sum(chunk.length == 1 for chunk in step.chunks) == 2 for step in steps[:8])
    assert request.sequences[0].output_token_ids == expected(request, GROUPS[:1])[0]
    assert loop.num_used_blocks == 0


def test_rounds_cost_their_layers_and_one_that_costs_more_than_a_step_is_run_alone():
    loop = loop_of(groups=in_parts(work=2.0, rounds=(6, 1, 1, 2)), max_num_seqs=4)
    request = with_images([("cat", 9), 3], 2)
    assert parts_of(loop.run(request))[:3] == [(0, 1), (1, 4), None], "43 of 29 tokens; 7, 7 and 14; the prompt"
    cheap = loop_of(groups=in_parts(work=0.5), max_num_seqs=4)
    assert cheap.run(with_images([("cat", 9), 3], 2))[0].work_of("encodes")[0].part is None


def test_requests_that_share_an_image_go_on_with_it_when_the_one_that_began_it_is_gone():
    loop = loop_of(groups=in_parts(), max_num_seqs=4)
    first, second = (with_images([("cat", 25), 3 + n], 2) for n in range(2))
    for request in (first, second):
        loop.scheduler.add(request)
    steps = [loop.step() for _ in range(2)]
    assert second in loop.scheduler.running
    loop.scheduler.abort(first)
    while loop.scheduler.has_work:
        steps.append(loop.step())
    assert parts_of(steps)[:6] == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 6)]
    assert second.sequences[0].output_token_ids == expected(second, GROUPS[:1])[0]
    assert loop.num_used_blocks == 0


def test_a_half_encoded_image_without_a_request_is_forgotten_and_another_takes_its_place():
    loop = loop_of(groups=in_parts(), max_num_seqs=4)
    cat, dog, text = with_images([("cat", 25)], 2), with_images([("dog", 25)], 2), with_images([4], 9)
    for request in (text, cat, dog):
        loop.scheduler.add(request)
    steps = [loop.step() for _ in range(3)]
    assert [encode.image.digest for step in steps for encode in step.work_of("encodes")] == [b"cat 25"] * 3
    loop.scheduler.abort(cat)
    assert parts_of([loop.step()]) == [(0, 1)] and loop.device.half_encoded[0].digest == b"dog 25"
    loop.scheduler.abort(dog)
    assert parts_of([loop.step()]) == [(0, 0)] and loop.device.half_encoded is None
    loop.run()
    assert loop.num_used_blocks == 0 and not loop.scheduler.memory.shared["images"].cached


def test_an_urgent_image_does_not_wait_for_a_less_urgent_one_that_gets_no_tokens():
    loop = loop_of(groups=in_parts(), max_num_seqs=8, policy="priority")
    late, urgent = with_images([("cat", 25)], 2, priority=1), with_images([("dog", 25)], 2, priority=0)
    loop.scheduler.add(late)
    loop.step()
    loop.scheduler.add(urgent)
    for turn in range(16):  # of texts that take all that the urgent request leaves
        loop.scheduler.add(with_images([24], 1, priority=0, cache_salt=str(turn)))
        loop.step()
    assert urgent.sequences[0].output_token_ids == expected(urgent, GROUPS[:1])[0]
    loop.run()
    assert late.sequences[0].output_token_ids == expected(late, GROUPS[:1])[0]


def test_given_features_cost_one_token_each_whatever_the_tower_computes():
    loop = loop_of(groups=[*GROUPS[:1], image_group(patches="pixels", work=5.0)])
    request = with_images([4, ("cat", 12), 3], 2)
    request.asks = asks_for([replace(image, arrays={}) for image in images_of(request)])
    assert costs(loop.run(request))[0] == (19, 12)


def test_an_image_is_held_until_its_last_token_and_its_head_is_given_up_before():
    loop = loop_of(max_num_seqs=1)
    loop.scheduler.add(with_images([("cat", 60)], 2, whole=False))
    used = []
    while loop.scheduler.has_work:
        loop.step()
        used.append(loop.scheduler.memory.report().groups[1].used)
    assert used[:3] == [15, 7, 0], "encoded; 32 features taken; all taken"


def test_one_image_in_many_requests_is_encoded_once():
    requests = [with_images([1 + number, ("cat", 8), 2]) for number in range(8)]
    steps = loop_of().run(*requests)
    assert sum(len(step.work_of("encodes")) for step in steps) == 1
    for request in requests:
        assert request.sequences[0].output_token_ids == expected(request, GROUPS[:1])[0]


def test_a_request_waits_for_a_prompt_with_the_same_images_and_for_no_other():
    loop = loop_of(300, budget=512)
    same = [with_images([("cat", 100), 60], 4) for _ in range(2)]
    steps = loop.run(*same)
    assert same[1].num_cached_tokens == 156 and len(steps[0].chunks) == 1
    others = [with_images([(name, 100), 60], 4) for name in ("dog", "cow")]
    steps = loop.run(*others)
    assert len(steps[0].chunks) == 2 and [request.num_cached_tokens for request in others] == [0, 0]


def test_a_request_whose_image_can_never_be_held_beside_its_tokens_is_refused():
    loop = loop_of(8, watermark=0.0)
    with pytest.raises(ValueError, match="can never fit the pool"):
        loop.run(with_images([20, ("cat", 20)], 10))
    loop.run(with_images([4, ("cat", 16)], 4))
    assert loop.num_used_blocks == 0


def test_an_image_that_stays_is_held_until_the_next_one_or_the_end():
    loop = loop_of(groups=READERS)
    loop.scheduler.add(request := with_images([2, ("cat", 8), 3, ("dog", 4), ("cow", 6), 2], 3, stays=True))
    used = []
    while loop.scheduler.has_work:
        loop.step()
        used.append(loop.scheduler.memory.report().groups[1].used)
    assert used == [0, 3, 3, 3, 0], "8 features for the first chunk, 10 together for all behind it"
    assert request.sequences[0].output_token_ids == expected(request, READERS[:1], stays=True)[0]


def test_requests_that_share_an_image_that_stays_run_together_where_apart_they_would_wait():
    def most_at_once(names):
        loop = loop_of(16, groups=READERS, budget=64)
        steps = loop.run(*(with_images([1 + i, (name, 24), 2], 6, stays=True) for i, name in enumerate(names)))
        return max(len(step.chunks) for step in steps)

    assert most_at_once(["cat"] * 4) == 4
    assert most_at_once(["cat", "dog", "cow", "hen"]) == 2


def test_an_urgent_request_takes_the_room_of_an_image_that_stays():
    loop = loop_of(10, groups=READERS, policy="priority")
    late = with_images([1, ("cat", 24), 2], 12, stays=True, priority=1)
    loop.scheduler.add(late)
    loop.step()
    urgent = with_images([1, ("dog", 24), 2], 2, stays=True, priority=0)
    loop.run(urgent)
    assert urgent.finished_time < late.finished_time and late.num_preemptions == 1


parts = st.lists(
    st.one_of(st.integers(1, 9), st.tuples(st.sampled_from(["cat", "dog", "cow"]), st.sampled_from([3, 8]))),
    min_size=1,
    max_size=5,
).map(lambda found: [part for i, part in enumerate(found) for part in ([part] if i % 2 else [1, part])])
"""Parts of a prompt; there is text between images, but for some that follow one another."""

ROOMS = {
    "full": [group("full", layer_bytes=4), image_group()],
    "window": [
        group("full", block_size=2, layer_bytes=3),
        group("window", window=5, block_size=2, layer_bytes=2),
        image_group(5),
    ],
    "readers": READERS,
    "dear": [group("full", layer_bytes=4), image_group(patches="pixels", work=0.6)],
    "cheap": [group("full", layer_bytes=4), image_group(patches="pixels", work=0.07)],
    "in parts": in_parts(work=1.1, rounds=(3, 3, 1, 1)),
}


@settings(max_examples=examples(150), deadline=None)
@given(
    arrivals=st.lists(
        st.tuples(
            st.integers(0, 4),  # step of arrival
            parts,
            st.integers(1, 12),  # max_tokens
            st.sampled_from([None] * 5 + [0, 2, 7]),  # steps until it is aborted
            st.sampled_from([1, 1, 3]),  # outputs
        ),
        min_size=3,
        max_size=8,
    ),
    room=st.sampled_from(sorted(ROOMS)),
    whole=st.booleans(),
    spare_pages=st.integers(0, 4),
    extra_budget=st.integers(9, 20),
    prefix_caching=st.booleans(),
    mode=st.sampled_from(["recompute", "swap"]),
)
def test_every_request_sees_its_own_images(arrivals, room, whole, spare_pages, extra_budget, prefix_caching, mode):
    groups, seqs = ROOMS[room], 4
    options = {"groups": groups, "max_num_seqs": seqs, "budget": seqs + extra_budget, "prefix_caching": prefix_caching}
    stays = groups is READERS
    coming = [
        Arrival(when, with_images(p, most, whole, stays, width=n), patience) for when, p, most, patience, n in arrivals
    ]
    sizes = sorted((request for _, request, _ in coming), key=lambda r: r.max_total_tokens)
    middle = sizes[len(sizes) // 2]

    def fits(num_pages):
        memory = make_scheduler(num_pages, **options).memory
        width, prompt = len(middle.sequences), len(middle.prompt_token_ids)
        largest = max((image.features for image in images_of(middle)), default=0)
        blocks = [-(-largest // 4) if isinstance(spec.policy, ImageFeatures) else 0 for spec in groups]
        need = Need(middle.max_total_tokens, width, prompt_tokens=prompt, held_blocks=blocks)
        return memory.can_admit(need) is not Fit.NEVER

    num_pages = next(n for n in count(1) if fits(n)) + spare_pages
    scheduler = make_scheduler(num_pages, **options, preemption_mode=mode, swap_blocks=min(2, num_pages))
    loop = Loop(scheduler)

    def within_budget(step):
        policy = groups[-1].policy
        each = PATCHES * policy.work if policy.patches else 1
        made = 0
        for encode in step.work_of("encodes"):
            first, stop, _ = encode.part or (0, len(policy.rounds), 0)
            share = sum(policy.rounds[first:stop]) / sum(policy.rounds) if policy.rounds else 1
            made += min(ceil(encode.image.features * each * share - 1e-6), 1 + extra_budget)
        assert step.num_tokens + made <= seqs + extra_budget

    accepted, _ = serve(loop, coming, within_budget)
    texts = [spec for spec in groups if not isinstance(spec.policy, ImageFeatures)]
    for request in accepted:
        for seq in request.sequences:
            tokens, reason = expected(request, texts, seq.index, stays)
            if seq.finish_reason == "abort":
                assert seq.output_token_ids == tokens[: seq.num_output]
            else:
                assert (seq.output_token_ids, seq.finish_reason) == (tokens, reason)
        assert not request.held
    assert loop.num_used_blocks == 0


def encoded(steps):
    return [encode.image.digest for step in steps for encode in step.work_of("encodes")]


@pytest.mark.parametrize("tier", ["ram", "disk"])
@pytest.mark.parametrize("stays", [False, True])
def test_features_that_the_pool_lost_come_back_from_a_tier_and_are_not_encoded_again(tier, stays):
    loop = loop_of(16, groups=READERS if stays else GROUPS, max_num_seqs=2, **{tier: FakeStore(delay=1)})

    def ask(*parts):
        """A request whose KV no other request can share."""
        request = with_images(parts, 4, stays=stays, whole=False, cache_salt=str(next(SALTS)))
        steps = loop.run(request)
        assert request.sequences[0].output_token_ids == expected(request, GROUPS[:1], stays=stays)[0]
        return encoded(steps)

    pictures = loop.scheduler.memory.shared["images"]
    assert len(ask(3, ("cat", 9), 5, ("dog", 6), 2)) == 2
    while pictures.cached:  # until the pool has lost them
        ask(50)
    assert ask(1, ("cat", 9), 5, ("dog", 6), 2) == [], "both come back"
    while pictures.cached:
        ask(50)
    assert ask(2, ("cow", 5), 3, ("dog", 6), 1) == [b"cow 5"], "one is new"
    assert not loop.scheduler.memory.tiers.prefetch.requests and not loop.num_used_blocks


def test_what_was_read_is_not_encoded_where_it_is_dropped_within_the_step(monkeypatch):
    monkeypatch.setattr(tier_prefetch, "LONGEST_STOP", 0.0)
    loop = loop_of(disk=FakeStore(0), max_num_seqs=4)
    loop.run(with_images([5, ("cat", 24), 3]))
    loop.run(with_images([7, ("dog", 24), 3]))
    for n in range(8):
        loop.run(make_request([1000 + n * 200 + i for i in range(150)], 2))
    prefetch = loop.scheduler.memory.tiers.prefetch
    prefetch._most_staged = 1  # so what was read for one is dropped when the next one comes
    loop.scheduler.add(with_images([40, ("cat", 24), 3], 4))
    steps = [loop.step()]
    assert prefetch.requests
    loop.scheduler.add(with_images([30, ("dog", 24), 3], 4))
    while loop.scheduler.has_work:
        steps.append(loop.step())
    assert max(sum(cost) for cost in costs(steps)) == 32 and not encoded(steps)


def test_features_that_are_slower_to_load_than_to_encode_are_encoded():
    slow = BreakEven(latency=100.0, read_rate=1.0)
    loop = loop_of(16, max_num_seqs=1, ram=FakeStore(), break_even=slow)
    for salt in "ab":
        loop.scheduler.memory.tiers.computed(1, 1e-3)
        assert len(encoded(loop.run(with_images([3, ("cat", 9), 5], cache_salt=salt)))) == 1
        loop.run(make_request([1] * 50, 4), make_request([2] * 50, 4))


@settings(max_examples=examples(15), deadline=None)
@given(
    st.lists(st.lists(st.one_of(st.integers(1, 20), st.sampled_from(PICTURES)), min_size=1, max_size=5), max_size=8),
    st.integers(0, 3),
    st.booleans(),
)
def test_whatever_comes_back_from_tiers_every_request_gets_its_own_pictures(prompts, delay, stays):
    groups = READERS if stays else GROUPS
    loop = loop_of(20, groups=groups, max_num_seqs=2, ram=FakeStore(delay), ram_pages=12, disk=FakeStore(2 * delay))
    requests = [
        with_images(parts, 3, stays=stays, whole=False, cache_salt=str(i % 3)) for i, parts in enumerate(prompts)
    ]
    loop.run(*requests)
    for request in requests:
        assert request.sequences[0].output_token_ids == expected(request, GROUPS[:1], stays=stays)[0]
    assert not loop.scheduler.memory.tiers.prefetch.requests and not loop.num_used_blocks


@pytest.mark.parametrize("rounds", [(1, 1), (1,) * 12, ()])
@pytest.mark.parametrize("before", [1, 3])
def test_questions_on_one_picture_that_come_together_compute_it_once(before, rounds):
    """Whether its encoding leaves tokens of a step or takes whole ones, in which the first question has none."""
    groups = [group(block_size=16), image_group(patches="pixels", work=2.0, rounds=rounds)]
    loop = loop_of(400, groups=groups, budget=256, max_num_seqs=8)
    questions = [with_images([before, ("cat", 200), 3 + n], 3, whole=False) for n in range(5)]
    loop.run(*questions)
    first, *others = (request.num_cached_tokens for request in questions)
    assert first == 0 and min(others) >= 112, "those 80 that are left at the last step of 12 cost less than a step"
    for request in questions:
        assert request.sequences[0].output_token_ids == expected(request, groups[:1])[0]
    assert loop.num_used_blocks == 0
