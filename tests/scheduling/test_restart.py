"""An exception at any line of the scheduler or of the memory: `restart` mends both, and no token is wrong or lost."""

from __future__ import annotations

import sys
from contextlib import contextmanager

from fake_device import FakeDevice, Loop
from hypothesis import given, settings
from hypothesis import strategies as st
from small_schedulers import group, make_request, make_scheduler
from thorough import examples
from unpaged import alone, alone_beams, hash_model

from jpaged import memory, scheduling
from jpaged.sampling_params import BeamSearchParams
from jpaged.scheduling import Status

FOLDERS = tuple(module.__file__.removesuffix("__init__.py") for module in (memory, scheduling))
GROUPS = {
    "full": [group("full")],
    "both": [group("full", block_size=2, layer_bytes=3), group("window", window=5, block_size=2, layer_bytes=2)],
    "window": [group("window", window=6)],
}


class Torn(Exception):
    """Stands for what may come at any moment."""


@contextmanager
def torn_at(line: int):
    """Raise `Torn` before so many lines of the scheduler and the memory were run."""
    left = line

    def trace(frame, event, arg):
        nonlocal left
        if not frame.f_code.co_filename.startswith(FOLDERS) or frame.f_code.co_filename.endswith("invariants.py"):
            return None
        if event == "line":
            left -= 1
            if left == 0:
                sys.settrace(None)
                raise Torn
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    except Torn:
        pass
    finally:
        sys.settrace(before)


requests_of = st.lists(
    st.tuples(
        st.integers(1, 20),  # prompt tokens
        st.integers(0, 1),  # which prompt
        st.integers(1, 12),  # max_tokens
        st.sampled_from([(), (3,)]),  # end-of-sequence ids
        st.sampled_from([1, 1, 2, 3]),  # outputs
        st.booleans(),  # a beam search
    ),
    min_size=2,
    max_size=6,
)


@settings(max_examples=examples(100), deadline=None)
@given(
    specs=requests_of,
    groups=st.sampled_from(sorted(GROUPS)),
    steps=st.lists(st.integers(1, 6), min_size=1, max_size=3),  # until the next exception
    lines=st.lists(st.integers(1, 1500), min_size=3, max_size=3),
    mode=st.sampled_from(["recompute", "swap"]),
    prefix_caching=st.booleans(),
)
def test_every_request_gets_its_tokens_after_an_exception_at_any_line(
    specs, groups, steps, lines, mode, prefix_caching
):
    options = {"groups": GROUPS[groups], "max_num_seqs": 4, "budget": 9, "preemption_mode": mode}
    loop = Loop(make_scheduler(24, prefix_caching=prefix_caching, swap_blocks=4, **options))
    requests = []
    for length, which, max_tokens, eos, n, is_beam in specs:
        prompt = [(which * 5 + i * i) % 11 for i in range(length)]
        beam = BeamSearchParams(n, max_tokens, 0.5) if is_beam else None
        request = make_request(prompt, max_tokens, eos=eos, width=n, beam=beam)
        try:
            loop.scheduler.add(request)
        except ValueError:
            continue
        requests.append(request)
    for count, line in zip(steps, lines, strict=False):
        for _ in range(count):
            loop.step()
        whole = False
        with torn_at(line):
            loop.step()
            whole = True
        if whole:
            continue
        begin_anew(loop)
    loop.run()
    for request in requests:
        assert request.status is Status.FINISHED and not request.live
        if request.beam is not None:
            found = [(s.output_token_ids, s.score, s.finish_reason) for s in request.sequences]
            assert found == [(h.token_ids, h.score, h.finish_reason) for h in alone_beams(request, GROUPS[groups])]
            continue
        for seq in request.sequences:
            want = alone(request, GROUPS[groups], index=seq.index)
            assert (seq.output_token_ids, seq.finish_reason) == want
    assert loop.num_used_blocks == 0
    assert sorted(loop.scheduler.allocation.free_rows) == list(range(4))


def begin_anew(loop: Loop) -> None:
    """What the engine does when a step was torn."""
    loop.in_flight = None
    loop.scheduler.restart()
    loop.device = FakeDevice(loop.scheduler.memory.layout, hash_model)
    loop.scheduler.memory.check_invariants()


def test_a_restart_keeps_tokens_log_probabilities_and_order():
    loop = Loop(make_scheduler(num_blocks=64, max_num_seqs=2))
    requests = [make_request(3 + i, 9) for i in range(4)]
    for request in requests:
        loop.scheduler.add(request)
    for _ in range(5):
        loop.step()
    before = [list(r.sequences[0].token_ids) for r in requests]
    begin_anew(loop)
    assert loop.scheduler.waiting == requests and not loop.scheduler.running
    assert [r.sequences[0].token_ids for r in requests] == before
    loop.run()
    for request in requests:
        assert request.sequences[0].output_token_ids == alone(request, [group()])[0]
        assert request.sequences[0].cumulative_logprob == -0.5 * 9


def test_a_restart_ends_what_its_last_token_ends():
    loop = Loop(make_scheduler())
    request = make_request(3, 2)
    loop.scheduler.add(request)
    loop.step()
    loop.step()
    request.sequences[0].token_ids.append(5)  # the exception came before the token was looked at
    begin_anew(loop)
    assert request.status is Status.FINISHED and not loop.scheduler.has_work
    assert request.sequences[0].finish_reason == "length"


class Refusing:
    def restart(self):
        raise RuntimeError("no")


def test_a_request_that_cannot_be_looked_at_again_is_aborted_alone():
    loop = Loop(make_scheduler())
    bad, good = make_request(3, 4), make_request(3, 4)
    for request in (bad, good):
        loop.scheduler.add(request)
    bad.sequences[0].stop_search = Refusing()
    begin_anew(loop)
    assert bad.sequences[0].finish_reason == "abort" and bad.status is Status.FINISHED
    assert "cannot be looked at again" in bad.sequences[0].stop_reason, "as if the engine had been shut down"
    loop.run()
    assert good.sequences[0].output_token_ids == alone(good, [group()])[0]
