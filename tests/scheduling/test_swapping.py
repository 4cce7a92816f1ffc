"""Preemption by swapping: order, all or nothing, and tokens that do not depend on it."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from itertools import count

from arrivals import GROUPS
from fake_device import Loop
from hypothesis import given, settings
from hypothesis import strategies as st
from small_schedulers import group, make_request, make_scheduler
from thorough import examples
from unpaged import alone

from jpaged.memory import Fit, Need
from jpaged.scheduling import Request, Sequence, Status


def swapping_loop(num_blocks: int = 6, **options) -> Loop:
    options = {"preemption_mode": "swap", "swap_blocks": num_blocks, "max_num_seqs": 4} | options
    return Loop(make_scheduler(num_blocks, **options))


def until_preempted(loop: Loop, *requests: Request):
    for request in requests:
        loop.scheduler.add(request)
    while not (step := loop.step()).preempted:
        assert loop.scheduler.has_work, "nothing was preempted"
    return step


@dataclass
class Forked:
    """A sequence forked by hand once `known` of its tokens were there."""

    request: Request
    seq: Sequence
    known: int

    def check(self, groups) -> None:
        """It went on as a request of its own would have."""
        twin = copy(self.request)
        twin.prompt_token_ids = self.seq.token_ids[: self.known]
        assert (self.seq.token_ids[self.known :], self.seq.finish_reason) == alone(twin, groups, index=self.seq.index)


def fork(loop: Loop, request: Request) -> Forked:
    """One more sequence of a running request, with the same blocks and another newest token."""
    loop.drain()
    parent = request.sequences[0]
    child = copy(parent)
    child.index = len(request.sequences)
    child.seq_id = -(1000 * request.request_id + child.index)
    child.token_ids = [*parent.token_ids[:-1], (parent.token_ids[-1] + child.index) % 11]
    child.row = loop.scheduler.allocation.free_rows.pop()
    loop.scheduler.allocation.fork(parent, child)
    request.sequences.append(child)
    loop.scheduler.queues.move(request, request.status)  # of several sequences now
    return Forked(request, child, len(child.token_ids))


def test_the_newest_request_is_swapped_out_and_goes_on_where_it_was():
    loop = swapping_loop()
    older, newer = make_request(11, 12), make_request(7, 9)
    step = until_preempted(loop, older, newer)
    assert newer.status is Status.SWAPPED and loop.scheduler.swapped == [newer]
    computed = newer.sequences[0].num_computed
    assert len(step.work_of("swap_out")) == -(-computed // 4)
    steps = loop.run()
    again = next(c for s in steps for c in s.chunks if c.seq is newer.sequences[0])
    assert (again.start, again.length, again.source_row) == (computed, 1, -1), "its newest token is the host's by now"
    for request in (older, newer):
        assert request.sequences[0].output_token_ids == alone(request, [group()])[0]
    assert (newer.num_preemptions, newer.num_swaps) == (1, 1)
    assert (loop.scheduler.num_preemptions, loop.scheduler.preemption.num_swaps) == (1, 1)


def test_nothing_is_admitted_while_a_swapped_request_waits():
    loop = swapping_loop()
    older, newer, small = make_request(11, 12), make_request(7, 9), make_request(1, 1)
    until_preempted(loop, older, newer)
    loop.scheduler.add(small)
    while newer.status is Status.SWAPPED:
        assert small.status is Status.WAITING
        loop.step()
    assert older.status is Status.FINISHED
    loop.run()
    assert small in loop.finished


def test_swapped_requests_come_back_oldest_first_and_before_waiting_ones():
    loop = swapping_loop(9, max_num_seqs=3)
    requests = [make_request(11, 20), make_request(7, 12), make_request(7, 12)]
    until_preempted(loop, *requests)
    while len(loop.scheduler.swapped) < 2:
        loop.step()
    assert loop.scheduler.swapped == requests[1:]
    waiting = make_request(3, 2)
    starts = {}
    for number, step in enumerate(loop.run(waiting)):
        for place, chunk in enumerate(step.chunks):
            starts.setdefault(chunk.seq, (number, place))
    order = [request.sequences[0] for request in (*requests, waiting)]
    assert sorted(starts, key=starts.get) == order


def test_in_auto_one_sequence_is_recomputed_and_several_are_swapped():
    for width, swaps, num_blocks in ((1, 0, 5), (2, 1, 7)):
        loop = swapping_loop(num_blocks, preemption_mode="auto")
        older, newer = make_request(7, 9), make_request(7, 4, width=width)
        until_preempted(loop, older, newer)
        assert (newer.num_preemptions, newer.num_swaps) == (1, swaps)
        loop.run()
        for seq in newer.sequences:
            assert seq.output_token_ids == alone(newer, [group()], index=seq.index)[0]


def test_a_request_that_the_host_cannot_hold_is_recomputed():
    loop = swapping_loop(swap_blocks=1)
    older, newer = make_request(11, 12), make_request(7, 9)
    step = until_preempted(loop, older, newer)
    assert not step.work_of("swap_out") and newer.status is Status.WAITING
    loop.run()
    assert newer.sequences[0].output_token_ids == alone(newer, [group()])[0]
    assert (newer.num_preemptions, newer.num_swaps) == (1, 0)


def test_an_aborted_request_leaves_nothing_in_host_memory():
    loop = swapping_loop()
    older, newer = make_request(11, 12), make_request(7, 9)
    until_preempted(loop, older, newer)
    assert loop.device.host
    loop.scheduler.abort(newer)
    assert newer.status is Status.FINISHED and loop.scheduler.swapped == []
    loop.run()
    assert loop.finished == [older] and loop.device.host == {} and loop.num_used_blocks == 0


def test_a_stop_that_arrives_after_the_swap_ends_the_request_there():
    def run(min_tokens):
        loop = Loop(make_scheduler(6, preemption_mode="swap", swap_blocks=6), lambda name: 5)
        newer = make_request(7, 9, eos=[5], min_tokens=min_tokens)
        until_preempted(loop, make_request(11, 12), newer)
        return loop, newer

    pending = run(min_tokens=9)[1].sequences[0].num_output
    loop, newer = run(min_tokens=pending)  # now the token that was on its way at the preemption is the last
    assert newer.status is Status.FINISHED and newer.num_swaps == 1
    assert newer.sequences[0].output_token_ids == [5] * pending
    loop.run()
    assert loop.finished[0] is newer and loop.device.host == {} and loop.num_used_blocks == 0


def test_forked_sequences_are_swapped_together_and_their_shared_blocks_once():
    loop = swapping_loop(8)
    older, pair = make_request(13, 8), make_request(9, 6)
    loop.scheduler.add(older)
    loop.scheduler.add(pair)
    loop.step()
    child = fork(loop, pair)
    step = until_preempted(loop)
    assert step.preempted == [pair]
    blocks = [-(-seq.num_computed // 4) for seq in pair.sequences]
    assert (
        len(step.work_of("swap_out"))
        == len({move.device_block for move in step.work_of("swap_out")})
        == sum(blocks) - 2
    )
    loop.run()
    child.check([group()])
    assert pair.sequences[0].output_token_ids == alone(pair, [group()])[0]
    assert loop.num_used_blocks == 0 and loop.device.host == {}


def test_a_copy_that_is_not_made_because_its_request_goes_is_made_up_for_by_the_swap():
    loop = swapping_loop(8)
    older, trio = make_request(17, 4), make_request(6, 4)
    loop.scheduler.add(older)
    loop.scheduler.add(trio)
    loop.step()
    children = [fork(loop, trio), fork(loop, trio)]
    step = until_preempted(loop)  # 5 + 2 blocks are used: one is left for two copies of the shared tail
    assert step.preempted == [trio] and not step.work_of("copies")
    assert len(step.work_of("swap_out")) == 3 and len({move.device_block for move in step.work_of("swap_out")}) == 2
    loop.run()
    for child in children:
        child.check([group()])
    assert trio.sequences[0].output_token_ids == alone(trio, [group()])[0]


def pages_for(length: int, options) -> int:
    """Pages that hold a sequence alone."""
    fits = (n for n in count(1) if make_scheduler(n, **options).memory.can_admit(Need(length)) is not Fit.NEVER)
    return next(fits)


requests = st.lists(
    st.tuples(
        st.integers(3, 14),  # prompt tokens
        st.integers(10, 16),  # max_tokens
        st.integers(1, 3),  # sequences, forked once the first token is there
        st.sampled_from([(), (), (3,)]),  # end-of-sequence ids
    ),
    min_size=4,
    max_size=6,
)


@settings(max_examples=examples(150), deadline=None)
@given(
    requests=requests,
    groups=st.sampled_from(sorted(GROUPS.keys() - {"budgets"})),  # there, what is kept depends on the prompt's end
    spare_pages=st.integers(0, 1),
    extra_budget=st.integers(0, 8),
    prefix_caching=st.booleans(),
    mode=st.sampled_from(["swap", "swap", "auto", "recompute"]),
    host_share=st.sampled_from([1.0, 1.0, 0.5, 0.1]),
)
def test_forked_sequences_get_the_tokens_they_would_get_alone(
    requests, groups, spare_pages, extra_budget, prefix_caching, mode, host_share
):
    specs = GROUPS[groups]
    options = {"groups": specs, "max_num_seqs": 8, "budget": 8 + extra_budget, "prefix_caching": prefix_caching}
    num_pages = spare_pages + max(width * pages_for(length + tokens, options) for length, tokens, width, _ in requests)
    loop = Loop(make_scheduler(num_pages, swap_blocks=int(num_pages * host_share), preemption_mode=mode, **options))
    todo = []
    for number, (length, tokens, width, eos) in enumerate(requests):
        request = make_request([(number % 2 * 5 + i * i) % 11 for i in range(length)], tokens, eos=eos)
        loop.scheduler.add(request)
        todo.append((request, width))
    waiting, forked = dict(enumerate(todo)), []
    for _ in range(2_000):
        if not (loop.scheduler.has_work or loop.in_flight):
            break
        for key, (request, width) in list(waiting.items()):
            seq = request.sequences[0]
            loop.drain()
            if request.status is Status.FINISHED or width == 1:
                del waiting[key]
            elif (
                request.status is Status.RUNNING
                and len(seq.token_ids) == seq.num_computed + 1 > seq.num_prompt
                and len(loop.scheduler.allocation.free_rows) >= width - 1
            ):
                forked += [fork(loop, request) for _ in range(width - 1)]
                del waiting[key]
        for _ in range(3):
            loop.step()
    assert not loop.scheduler.has_work, "it does not end"
    for request, _ in todo:
        forked.append(Forked(request, request.sequences[0], len(request.prompt_token_ids)))
    for child in forked:
        child.check(specs)
    assert loop.num_used_blocks == 0
    loop.step()
    assert loop.device.host == {}
