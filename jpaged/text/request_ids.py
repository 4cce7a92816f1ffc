"""Numbers requests and sequences, and draws seeds for requests without one."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np

from jpaged.sampling_params import SamplingParams
from jpaged.scheduling import Request


class RequestIds:
    """Counts the ids of one engine; any number of threads may ask at once.

    Args:
        seed: draws the seeds of requests that bring none.
    """

    def __init__(self, seed: int) -> None:
        self._seeds = np.random.default_rng(seed)
        self._lock = threading.Lock()  # of the seeds and the two counts
        self._num_requests = 0  # ids given so far
        self._num_sequences = 0
        self._num_loaded = 0  # requests below it were made before others' ids were loaded, or are those others

    def draw(self, params: SamplingParams, turns: int) -> tuple[int, list[int], list[int]]:
        """Return a request's seed, an id for each of its turns, and the ids of its sequences."""
        with self._lock:
            seed = int(self._seeds.integers(2**63)) if params.seed is None else params.seed
            first, self._num_requests = self._num_requests, self._num_requests + turns
            return seed, list(range(first, first + turns)), [self._next_seq_id() for _ in range(params.n)]

    def new_seq_id(self) -> int:
        """Return a sequence id that nothing else has."""
        with self._lock:
            return self._next_seq_id()

    def _next_seq_id(self) -> int:
        self._num_sequences += 1
        return self._num_sequences - 1

    def data(self) -> dict[str, Any]:
        """Return which ids were given and how far the seeds are drawn, as plain data."""
        with self._lock:
            state = self._seeds.bit_generator.state
            return {"requests": self._num_requests, "sequences": self._num_sequences, "seeds": json.dumps(state)}

    def load(self, data: Mapping[str, Any]) -> None:
        """Go on where others were: no id is given again, and seeds are drawn from there on."""
        with self._lock:
            self._num_requests = max(self._num_requests, data["requests"])
            self._num_sequences = max(self._num_sequences, data["sequences"])
            self._seeds.bit_generator.state = json.loads(data["seeds"])
            self._num_loaded = self._num_requests

    def renew(self, request: Request) -> None:
        """Give a request new ids if it was made before others' ids were loaded, which may be its own; its parts too."""
        with self._lock:
            if request.request_id >= self._num_loaded:
                return
            for part in request.all_requests:
                part.request_id, self._num_requests = self._num_requests, self._num_requests + 1
                for seq in part.sequences:
                    seq.seq_id = self._next_seq_id()
