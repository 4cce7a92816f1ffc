"""Random requests that come while others run, and are given up; the groups of layers whose pools they share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import count
from typing import Literal, NamedTuple

from fake_device import Loop
from hypothesis import strategies as st
from small_schedulers import group, make_request, make_scheduler

from jpaged.memory import Fit, Need
from jpaged.sampling_params import BeamSearchParams
from jpaged.scheduling import Request, ScheduledStep

# Byte sizes whose least common multiple puts several blocks of each group into a large page.
GROUPS = {
    "full": [group("full")],
    "window": [group("window", window=6)],
    "both": [
        group("full", block_size=2, layer_bytes=3),
        group("window", window=5, block_size=2, layer_bytes=2),
    ],
    "budgets": [
        group("low", budget=8, layer_bytes=3),
        group("high", budget=2, block_size=2, layer_bytes=2),
    ],
    "states": [group("state", interval=8)],
    "hybrid": [
        group("full", block_size=2, layer_bytes=3),
        group("window", window=5, block_size=2, layer_bytes=2),
        group("state", interval=6, block_size=2, layer_bytes=9),
    ],
    "sizes": [
        group("full", block_size=4, layer_bytes=4),
        group("window", window=3, block_size=2, layer_bytes=6),
    ],
}


class Drawn(NamedTuple):
    """What is drawn of a request."""

    when: int
    """Step of arrival."""
    length: int
    """Tokens of its prompt."""
    which: int
    """Which prompt: all of one number begin alike."""
    max_tokens: int
    eos: tuple[int, ...]
    min_tokens: int
    patience: int | None
    """Steps until it is aborted; None = it is not."""
    width: int
    """Outputs, or beams."""
    early_stopping: bool | Literal["never"] | None
    """Of a beam search; None = it is sampled."""

    def request(self) -> Request:
        prompt = [(self.which * 5 + i * i) % 11 for i in range(self.length)]
        if self.early_stopping is not None:
            beam = BeamSearchParams(self.width, self.max_tokens, 0.5, self.early_stopping)
            return make_request(prompt, eos=self.eos, beam=beam)
        least = min(self.min_tokens, self.max_tokens)
        return make_request(prompt, self.max_tokens, eos=self.eos, min_tokens=least, width=self.width)


drawn_arrivals = st.lists(
    st.builds(
        Drawn,
        when=st.integers(0, 4),
        length=st.integers(1, 24),
        which=st.integers(0, 2),
        max_tokens=st.integers(1, 30),
        eos=st.sampled_from([(), (), (3,), (3, 7)]),
        min_tokens=st.integers(0, 9),
        patience=st.sampled_from([None] * 5 + [0, 1, 3, 8, 20]),
        width=st.sampled_from([1, 1, 2, 3, 4]),
        early_stopping=st.sampled_from([None, None, False, True, "never"]),
    ),
    min_size=4,
    max_size=10,
)


def pages_for(arrivals: list[Drawn], options) -> int:
    """Pages that hold the request of median size alone: most tests preempt, some requests are refused."""
    sizes = [(a.length, a.length + a.max_tokens, min(a.width, options["max_num_seqs"])) for a in arrivals]
    prompt, total, width = sorted(sizes, key=lambda size: size[1] * size[2])[len(arrivals) // 2]

    def fits(num_pages: int) -> bool:
        memory = make_scheduler(num_pages, **options).memory
        return memory.can_admit(Need(total, width, prompt_tokens=prompt)) is not Fit.NEVER

    return next(n for n in count(1) if fits(n))


class Arrival(NamedTuple):
    """A request that comes before step `when`, and is aborted `patience` steps later; None = never."""

    when: int
    request: Request
    patience: int | None


def in_order(drawn: Iterable[Drawn]) -> list[Arrival]:
    """Make the requests, the first to come first."""
    return [Arrival(one.when, one.request(), one.patience) for one in sorted(drawn, key=lambda one: one.when)]


def serve(
    loop: Loop, arrivals: Iterable[Arrival], look: Callable[[ScheduledStep], None] = lambda step: None
) -> tuple[list[Request], set[int]]:
    """Serve requests in order of arrival and return those that were accepted, and the ids of those that were aborted.
    Their number of steps is linear in their tokens.

    Args:
        look: is shown every step.
    """
    todo = sorted(arrivals, key=lambda arrival: arrival.when)
    accepted: list[tuple[Request, int | None]] = []
    aborted: set[int] = set()
    now = total = 0
    while True:
        while todo and todo[0].when <= now:
            _, request, patience = todo.pop(0)
            try:
                loop.scheduler.add(request)
            except ValueError:
                continue
            total += request.max_total_tokens * len(request.sequences)
            accepted.append((request, None if patience is None else now + patience))
        for request, when in accepted:
            if when == now:
                loop.scheduler.abort(request)
                aborted.add(request.request_id)
        if not (todo or loop.scheduler.has_work or loop.in_flight):
            return [request for request, _ in accepted], aborted
        look(loop.step())
        assert now < 50 + 40 * total, "it does not end"
        now += 1
