"""Recurrent layers through scheduler, memory, batch, step and pool, alone and beside attention."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from on_devices import printed_on_devices
from small_schedulers import make_request
from state_models import (
    BLOCK,
    INTERVAL,
    NUM_TOKENS,
    PROMPTS,
    STATES,
    VOCAB,
    Sums,
    SumsAndAttention,
    best,
    expected,
    greedy,
    make_runner,
    make_scheduler,
    prompt,
    serve,
)
from thorough import rarely

from jpaged.engine.pinned_prefixes import PinnedPrefixes
from jpaged.execution.caches.base import BlockSettings
from jpaged.execution.caches.state import StateCache
from jpaged.memory import PinnedSequences
from jpaged.sampling_params import BeamSearchParams
from jpaged.scheduling import BeamSearch
from jpaged.scheduling.top_tokens import TokenRanking


@pytest.fixture(scope="module", params=[Sums, SumsAndAttention], ids=["alone", "beside attention"])
def runner(request):
    return make_runner(request.param())


def outputs(requests) -> list[list[int]]:
    return [request.sequences[0].output_token_ids for request in requests]


@pytest.mark.parametrize("budget", [24, rarely(160)])
def test_chunks_of_any_size_give_the_tokens_of_whole_sequences(runner, budget):
    requests = [greedy(tokens) for tokens in PROMPTS]
    serve(runner, make_scheduler(runner, budget=budget), requests)
    assert outputs(requests) == list(map(expected, PROMPTS))


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preemption_gives_the_tokens_of_whole_sequences(runner, mode):
    alone = len(runner.spec.caches) == 1
    requests = [greedy(tokens, 2 * NUM_TOKENS) for tokens in PROMPTS]
    forked = [] if alone else [make_request(prompt(40, 3), 2 * NUM_TOKENS, width=3, temperature=1000.0)]
    scheduler = make_scheduler(runner, 6 if alone else 30, budget=40, preemption_mode=mode)
    serve(runner, scheduler, [*requests[:2], *forked, *requests[2:]])
    assert outputs(requests) == [expected(tokens, 2 * NUM_TOKENS) for tokens in PROMPTS]
    for request in forked:
        check_logprobs(request)
    assert scheduler.num_preemptions > 0
    assert scheduler.memory.num_used_blocks == 0


def test_prefixes_hit_where_a_prompt_ended_from_the_second_request_on(runner):
    shared, scheduler = prompt(100, 7), make_scheduler(runner)
    hits = []
    for number in range(4):
        request = greedy([*shared, *prompt(11, 70 + number)])
        serve(runner, scheduler, [request])
        assert outputs([request]) == [expected(request.prompt_token_ids)]
        hits.append(request.num_cached_tokens)
    assert hits == [0, 96, 96, 96], "the last multiple of a block within the first prompt is where the shared part ends"
    together = [greedy([*shared, *prompt(9, 80 + number)]) for number in range(4)]
    serve(runner, scheduler, together)
    assert [request.num_cached_tokens for request in together] == [96] * 4
    assert outputs(together) == [expected(request.prompt_token_ids) for request in together]


def test_prompts_that_come_together_share_what_is_worth_waiting_for(runner):
    shared = prompt(100, 8)
    requests = [greedy([*shared, *prompt(11, 60 + number)]) for number in range(6)]
    serve(runner, make_scheduler(runner), requests)
    assert outputs(requests) == [expected(request.prompt_token_ids) for request in requests]
    hits = [request.num_cached_tokens for request in requests]
    assert hits[0] == 0 and hits[1:] == [96] * 5, "the first one's end"


def test_salts_are_kept_apart(runner):
    scheduler, hits = make_scheduler(runner), []
    for salt in "abab":
        request = greedy(PROMPTS[2], cache_salt=salt)
        serve(runner, scheduler, [request])
        assert outputs([request]) == [expected(PROMPTS[2])]
        hits.append(request.num_cached_tokens)
    assert hits == [0, 0, 144, 144]


def test_a_pinned_prefix_is_kept_whole(runner):
    scheduler, system = make_scheduler(runner), prompt(100, 9)
    pins = PinnedSequences(scheduler.memory, 40)
    replica = SimpleNamespace(pins=pins, scheduler=scheduler, memory=scheduler.memory)

    def compute(_, own) -> None:
        serve(runner, scheduler, [own])

    prefixes = PinnedPrefixes([replica], lambda refusal=(): nullcontext(), begin=compute, abort=lambda *requests: None)
    assert prefixes.begin(10**6, [greedy(system, 1)]) == 96
    assert prefixes.is_held(10**6)
    for number in range(3):  # what comes between takes the rest of the pool
        serve(runner, scheduler, [greedy(prompt(150, 30 + number))])
    request = greedy([*system, 5, 6, 7])
    serve(runner, scheduler, [request])
    assert request.num_cached_tokens == 96
    assert outputs([request]) == [expected(request.prompt_token_ids)]
    scheduler.restart()
    replica.pins.lose()
    prefixes.pin_again()  # has it computed
    prefixes.pin_again()
    assert scheduler.memory.pinned_prefix([*system, 5, 6, 7]) == 96
    prefixes.unpin(10**6)


def check_logprobs(request) -> None:
    """Check the log-probabilities of the drawn tokens, which depend on each sequence's own sums."""
    for seq in request.sequences:
        tokens, logprob = list(request.prompt_token_ids), 0.0
        for token in seq.output_token_ids:
            logits = -((best(tokens) - np.arange(VOCAB)) ** 2)
            logprob += logits[token] - np.log(np.exp(logits).sum())
            tokens.append(token)
        assert seq.cumulative_logprob == pytest.approx(logprob, rel=1e-4)


@pytest.mark.parametrize("length", [40, 64])
def test_forks_copy_the_state_once_and_no_block_of_the_prompt(runner, length, monkeypatch):
    scheduler, made = make_scheduler(runner), []
    schedule = scheduler.schedule
    monkeypatch.setattr(scheduler, "schedule", lambda: made.append(schedule()) or made[-1])
    request = make_request(prompt(length, 3), NUM_TOKENS, width=4, temperature=1000.0)
    serve(runner, scheduler, [request])
    assert len({tuple(seq.output_token_ids) for seq in request.sequences}) == 4
    check_logprobs(request)
    (state,) = [g for g, group in enumerate(scheduler.memory.layout.groups) if group.spec.name == "state"]
    copies = [copy.group for step in made for copy in step.work_of("copies")]
    forked = 3 if length % INTERVAL else 0  # a prompt that ends with a checkpoint is not copied
    ends = range(length + 1, length + NUM_TOKENS - 1)  # of an answer; the last one is not looked after
    answers = 4 * sum(end % BLOCK == 0 and end % INTERVAL > 0 for end in ends)  # each sequence's state is kept apart
    assert copies.count(state) == forked + answers
    assert len(copies) - copies.count(state) <= 3 * (len(scheduler.memory.layout.groups) - 1), "but partial tails"


def test_beams_are_those_of_whole_sequences(runner):
    params = BeamSearchParams(beam_width=3, max_tokens=8)
    request = make_request(prompt(70, 4), beam=params, temperature=0)
    serve(runner, make_scheduler(runner), [request])
    search = BeamSearch(params, params.max_tokens, frozenset())
    beams: list[list[int]] = [[]]
    while beams:
        rankings = []
        for beam in beams:
            logits = -((best([*request.prompt_token_ids, *beam]) - np.arange(VOCAB)) ** 2)
            order = np.argsort(-logits, kind="stable")[: search.num_candidates]
            scores = logits[order] - np.log(np.exp(logits).sum())
            rankings.append(TokenRanking(1, order.tolist(), scores.tolist()))
        beams = [[*beams[on.parent], on.token] for on in search.advance(beams, rankings)]
    found = [seq.output_token_ids for seq in request.sequences]
    assert found == [hypothesis.token_ids for hypothesis in search.finished]


def test_deterministic_steps_carry_states_from_launch_to_launch():
    runner = make_runner(SumsAndAttention(), deterministic=True)
    requests = [greedy(tokens) for tokens in PROMPTS]
    serve(runner, make_scheduler(runner), requests)
    assert outputs(requests) == list(map(expected, PROMPTS))


def test_two_devices_keep_half_of_each_state():
    one, two = (StateCache(STATES, BlockSettings(BLOCK, jnp.dtype("float32"), shards)) for shards in (1, 2))
    assert [place.shape for place in two.places.values()] == [(64,), (32,)]
    assert two.layer_shape == one.layer_shape == (16, 128), "whole tiles"
    found = printed_on_devices(2, Path(__file__).with_name("state_models.py"))
    assert found == list(map(expected, PROMPTS[:3]))


def test_a_state_of_another_width_than_the_pools_elements_takes_whole_tiles():
    narrow = StateCache(STATES, BlockSettings(BLOCK, jnp.dtype("bfloat16"), 1))
    assert narrow.layer_shape == (32, 128)
