"""Recurrent layers whose steps verify drafts: whatever is kept of these, a sequence goes on from its own state."""

from __future__ import annotations

import numpy as np
import pytest
from small_schedulers import make_request
from state_models import (
    INTERVAL,
    PROMPTS,
    VOCAB,
    Sums,
    SumsAndAttention,
    best,
    expected,
    greedy,
    make_runner,
    make_scheduler,
    serve,
)
from thorough import rarely

from jpaged.scheduling.speculation import Speculation

DRAFTS = 5
NUM_TOKENS = 80
"""More than a checkpoint is apart from the next, so that drafts go beyond some."""


class Guesses(Speculation):
    """Drafts the tokens that come next, up to a random one."""

    def __init__(self) -> None:
        super().__init__(DRAFTS)
        self._rng = np.random.default_rng(1)

    def took(self, seq) -> None:
        pass

    def _worth_waiting(self, seq, most, batch) -> bool:
        return bool(self._rng.integers(4))

    def _draft(self, seq, most, *, batch, verifies) -> tuple[int, ...]:
        drafts: list[int] = []
        right = self._rng.integers(most + 1)
        for number in range(self._rng.integers(most + 1)):
            drafts.append((best([*seq.token_ids, *drafts]) + (number >= right)) % VOCAB)
        return tuple(drafts)


@pytest.fixture(scope="module", params=[Sums, SumsAndAttention], ids=["alone", "beside attention"])
def runner(request):
    return make_runner(request.param(), num_pages=400, most_drafts=DRAFTS)


def check(requests) -> None:
    for request in requests:
        found = expected(request.prompt_token_ids, NUM_TOKENS)
        assert [seq.output_token_ids for seq in request.sequences] == [found] * len(request.sequences)


@pytest.mark.parametrize("mode", ["recompute", rarely("swap")])
def test_forks_and_preempted_sequences_go_on_behind_the_drafts_that_were_kept(runner, mode):
    requests, alone = [greedy(tokens, NUM_TOKENS) for tokens in PROMPTS], len(runner.spec.caches) == 1
    if not alone:
        requests.insert(1, make_request(PROMPTS[3], NUM_TOKENS, width=3, temperature=0))
    scheduler = make_scheduler(runner, 15 if alone else 64, budget=40, preemption_mode=mode, speculation=Guesses())
    serve(runner, scheduler, requests)
    check(requests)
    assert scheduler.num_preemptions > 0
    assert 0 < scheduler.speculation.num_accepted < scheduler.speculation.num_drafted
    assert scheduler.memory.num_used_blocks == 0


def test_checkpoints_that_drafts_went_beyond_hold_the_state_of_their_own_prefix(runner):
    """Some were written with the state of drafts that were lost, and again before anybody could find them."""
    scheduler = make_scheduler(runner, speculation=Guesses())
    first = [greedy(tokens, NUM_TOKENS) for tokens in PROMPTS]
    first.append(make_request(PROMPTS[4], NUM_TOKENS, width=3, temperature=0))
    serve(runner, scheduler, first)
    longer = [greedy(request.sequences[0].token_ids[:-1], NUM_TOKENS) for request in first]
    serve(runner, scheduler, longer)
    check([*first, *longer])
    hits = [(request.num_cached_tokens, len(request.prompt_token_ids)) for request in longer]
    assert all(hit >= (length - 1) // INTERVAL * INTERVAL > 0 for hit, length in hits)


def test_deterministic_steps_leave_a_state_behind_every_draft():
    runner = make_runner(SumsAndAttention(), most_drafts=DRAFTS, deterministic=True)
    requests = [greedy(tokens, NUM_TOKENS) for tokens in PROMPTS]
    scheduler = make_scheduler(runner, speculation=Guesses())
    serve(runner, scheduler, requests)
    check(requests)
    assert scheduler.speculation.num_accepted > 0


def test_the_states_of_drafts_lie_in_blocks_of_the_same_view():
    runner = make_runner(Sums(), most_drafts=DRAFTS)
    groups = runner.spec.layout.groups
    assert [group.spec.name for group in groups] == ["state", "state.verified"]
    assert runner.spec.views[0] == runner.spec.views[1]
    assert len(make_runner(Sums()).spec.layout.groups) == 1
