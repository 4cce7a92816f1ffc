"""Requests and queues are plain data: what was written goes on with the tokens it would have had."""

from __future__ import annotations

from dataclasses import fields, replace

import msgpack
import numpy as np
import pytest
from arrivals import GROUPS, drawn_arrivals, pages_for
from fake_device import Loop
from hypothesis import given, settings
from hypothesis import strategies as st
from small_rules import constrained_request
from small_schedulers import group, make_request, make_scheduler
from thorough import examples
from unpaged import alone, alone_beams

from jpaged import NGram
from jpaged.memory.saving import held_blocks, load_memory, memory_data
from jpaged.sampling_params import RequestOutputKind, SamplingParams
from jpaged.scheduling import Request, Sequence, Status
from jpaged.scheduling.saving import (
    RENAMED,
    REQUEST_FIELDS,
    SEQUENCE_FIELDS,
    TIMES,
    load_request,
    load_scheduler,
    request_data,
    scheduler_data,
)
from jpaged.scheduling.top_tokens import TokenRanking
from jpaged.structured_outputs import StructuredOutputsParams


def written(data):
    return msgpack.unpackb(msgpack.packb(data), strict_map_key=False)


def go_on(loop: Loop, requests: dict[int, Request], make) -> Loop:
    """Another scheduler goes on from what this one has written, on a device that has the saved blocks and no more."""
    loop.drain()
    scheduler, device = loop.scheduler, loop.device
    saved = written(
        {
            "memory": memory_data(scheduler.memory),
            "scheduler": scheduler_data(scheduler),
            "requests": [request_data(request, 100.0) for request in requests.values()],
        }
    )
    new = Loop(make(), device.model)
    load_memory(new.scheduler.memory, saved["memory"])
    requests |= {data["request_id"]: load_request(data, 200.0) for data in saved["requests"]}
    load_scheduler(new.scheduler, saved["scheduler"], [requests[key] for key in saved["scheduler"]["requests"]])
    held = [set(blocks) for blocks in held_blocks(saved["memory"])]
    new.device.pages = [
        (g, {cell: name for cell, name in cells.items() if cell[0] in held[g]}) for g, cells in device.pages
    ]
    owners = saved["memory"]["host"]["owners"]
    new.device.host = {key: content for key, content in device.host.items() if owners[key.group][key.block]}
    assert written(scheduler_data(new.scheduler)) == saved["scheduler"]
    return new


@settings(max_examples=examples(90), deadline=None)
@given(
    arrivals=drawn_arrivals,
    groups=st.sampled_from(sorted(set(GROUPS) - {"budgets"})),
    spare_pages=st.integers(0, 4),
    max_num_seqs=st.integers(2, 8),
    prefix_caching=st.booleans(),
    preemption_mode=st.sampled_from(["recompute", "swap"]),
    drafts=st.booleans(),
    every=st.integers(1, 6),
)
def test_a_scheduler_that_is_saved_again_and_again_gives_the_same_tokens(
    arrivals, groups, spare_pages, max_num_seqs, prefix_caching, preemption_mode, drafts, every
):
    options = {
        "groups": GROUPS[groups],
        "max_num_seqs": max_num_seqs,
        "budget": max_num_seqs + 5,
        "prefix_caching": prefix_caching,
    }
    num_pages = pages_for(arrivals, options) + spare_pages
    options |= {"preemption_mode": preemption_mode, "swap_blocks": min(3, num_pages)}
    if drafts and groups in ("full", "window", "both", "sizes") and max_num_seqs > 2:
        options["speculative"] = NGram(tokens=2)
    loop = Loop(make_scheduler(num_pages, **options))
    requests: dict[int, Request] = {}
    for one in arrivals:
        request = one.request()
        try:
            loop.scheduler.add(request)
        except ValueError:
            continue
        requests[request.request_id] = request
    steps = 0
    while loop.scheduler.has_work:
        loop.step()
        steps += 1
        if steps % every == 0:
            loop = go_on(loop, requests, lambda: make_scheduler(num_pages, **options))
        assert steps < 10_000, "it does not end"
    for request in requests.values():
        assert request.status is Status.FINISHED
        if request.beam is not None:
            found = [(s.output_token_ids, s.score, s.finish_reason) for s in request.sequences]
            want = [(h.token_ids, h.score, h.finish_reason) for h in alone_beams(request, GROUPS[groups])]
            assert found == want
            continue
        for seq in request.sequences:
            assert (seq.output_token_ids, seq.finish_reason) == alone(request, GROUPS[groups], index=seq.index)
    assert loop.num_used_blocks == 0
    loop.step()
    assert not loop.device.host
    assert sorted(loop.scheduler.allocation.free_rows) == list(range(max_num_seqs))


@pytest.mark.parametrize(
    "pages, prompt, output, kept, ends", [(2, 42, 1, 0, ()), (200, 60, 4, 44, (13, 34)), (200, 60, 4, 16, ())]
)
def test_what_a_request_leaves_for_later_ones_is_as_it_was(pages, prompt, output, kept, ends):
    """The first fits only where it leaves no state."""
    groups = [group("full", layer_bytes=8), group("state", interval=8, layer_bytes=160 if pages < 4 else 16)]
    request = make_request(range(prompt), output)
    request.kept_tokens, request.prefix_ends = kept, ends
    options = {"groups": groups, "prefix_caching": True, "budget": 9}
    loop, requests = Loop(make_scheduler(pages, **options)), {request.request_id: request}
    loop.scheduler.add(request)
    while loop.scheduler.has_work:
        loop.step()
        loop = go_on(loop, requests, lambda: make_scheduler(pages, **options))
    (request,) = requests.values()
    assert request.sequences[0].output_token_ids == alone(request, groups)[0] and not request.num_preemptions


def test_a_sequence_that_awaited_drafts_runs_ahead_where_none_are_made():
    steps = []
    for needs_host in (False, True):
        request, loop = constrained_request(3, 8), Loop(make_scheduler())
        request.sequences[0].needs_host = needs_host
        loop.scheduler.restore(request)
        steps.append(len(loop.run()))
    assert steps[0] == steps[1]


PARAMS = SamplingParams(
    n=2,
    temperature=0.5,
    top_k=3,
    top_p=0.4,
    min_p=0.1,
    presence_penalty=0.1,
    frequency_penalty=0.2,
    repetition_penalty=1.1,
    logit_bias={3: 0.25, 11: -1.0},
    allowed_token_ids=[1, 2, 3],
    bad_words=["half"],
    max_tokens=7,
    min_tokens=2,
    seed=2**63 - 1,
    stop=["end", "\n"],
    stop_token_ids=[5],
    ignore_eos=True,
    include_stop_str_in_output=True,
    skip_special_tokens=False,
    spaces_between_special_tokens=False,
    logprobs=3,
    prompt_logprobs=1,
    truncate_prompt_tokens=9,
    thinking_token_budget=8,
    reasoning_end_str="I have to answer now.",
    reasoning_parser="think",
    tool_parser="none",
    structured_outputs=StructuredOutputsParams(json={"type": "integer", "maximum": 10**30}),
    output_kind=RequestOutputKind.DELTA,
)


def test_every_parameter_comes_back():
    defaults = SamplingParams()
    same = [f.name for f in fields(PARAMS) if getattr(PARAMS, f.name) == getattr(defaults, f.name)]
    assert same == ["detokenize"], "a parameter that this test does not change (text needs detokenize)"
    request = make_request([1, 2, 3])
    request.params = PARAMS
    data = msgpack.packb(request_data(request, 0.0), unicode_errors="surrogatepass")
    data = msgpack.unpackb(data, strict_map_key=False, unicode_errors="surrogatepass")
    assert load_request(data, 0.0).params == PARAMS


def test_when_a_request_was_preempted_is_kept_as_ages():
    request = make_request([1, 2, 3])
    request.pause_times = [2.0, 3.0, 5.0]
    data = written(request_data(request, 10.0))
    assert load_request(data, 110.0).metrics().preempted == ((102.0, 103.0), (105.0, None))


def test_every_field_of_requests_and_sequences_is_saved_or_follows_from_what_is():
    """Whoever adds a field says here which; one that is saved needs another `FORMAT`."""
    apart = {"params", "stop_ids", "eos_ids", "bad_words", "allowed_mask", "prompt_logprobs", "beam", "status"}
    apart |= {"pause_times", "asks", "retention", "prefix_ends", "tier_tokens"}
    held_again = {"held"}  # what the saved memory has is cached there; the rest is made again
    within_a_turn = {"pooling", "pooled"}  # of requests that begin and end while nobody else has the engine
    follows = {"edits", "most_pages"}  # from the parameters and from the pool
    others = {*held_again, *within_a_turn, *follows, "sequences", "overflow_requests"}
    plain = {RENAMED.get(name, name) for name in REQUEST_FIELDS}
    assert {f.name for f in fields(Request)} == {*plain, *TIMES, *apart, *others}
    derived = {"num_pending", "capacity", "pending_row", "grammar", "stop_search", "places", "awaits_mask", "is_slow"}
    apart = {"token_ids", "candidates", "logprobs", "parent"}
    plain = {RENAMED.get(name, name) for name in SEQUENCE_FIELDS}
    assert {f.name for f in fields(Sequence)} == {*plain, *apart, *derived}


def test_what_a_request_has_comes_back_and_its_times_go_on():
    request = make_request(range(5), 6, width=3, cache_salt="tenant", kept_tokens=4)
    first, second, third = request.sequences
    first.token_ids += [7, 8]
    first.logprobs = [(-0.5, TokenRanking(1, [7, 9], [-0.5, -0.6]))] * 2
    first.finish_reason, first.stop_reason = "stop", "end"
    third.parent, third.fork_at = second, 5
    second.candidates = TokenRanking(2, [4], [-1.0])
    request.prompt_logprobs = {1: (-2.0, TokenRanking(4, [1], [-0.25]))}
    request.allowed_mask = np.array([-5, 7], np.int32)
    request.bad_words = ((1, 2), (3,))
    request.arrival_time, request.first_token_time = 90.0, 95.0
    request.overflow_requests = [
        replace(request, request_id=-7, sequences=[Sequence(-8, 3, [0, 1, 2, 3, 4], 5)], overflow_requests=[])
    ]
    found = load_request(written(request_data(request, 100.0)), 1000.0)
    assert (found.arrival_time, found.first_token_time, found.first_scheduled_time) == (990.0, 995.0, None)
    assert found.allowed_mask.tolist() == [-5, 7] and found.allowed_mask.dtype == np.int32
    assert found.sequences[2].parent is found.sequences[1] and found.sequences[1].parent is None
    assert found.sequences[0].token_ids == [0, 1, 2, 3, 4, 7, 8]
    for one, other in zip(request.all_requests, found.all_requests, strict=True):
        assert request_data(one, 100.0) == request_data(other, 1000.0)


@pytest.mark.parametrize("missing", ["params", "sequences", "seed"])
def test_data_without_a_part_are_no_request(missing):
    data = request_data(make_request(3), 0.0)
    del data[missing]
    with pytest.raises(KeyError):
        load_request(data, 0.0)
