"""The engine's loop: schedule, dispatch, read back, one step ahead of the host."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from jpaged.beam_search_params import BeamSearchParams
from jpaged.detokenizer import Detokenizer
from jpaged.execution import Runner
from jpaged.grammar import GrammarCompiler
from jpaged.memory import MemoryManager
from jpaged.replica import Replica
from jpaged.sampling_params import SamplingParams
from jpaged.scheduling import BeamSearch, Request, Scheduler, Sequence
from jpaged.token_rules import allowed_mask, bad_word_tokens, check_token_ids, check_tokens_left


@dataclass
class EngineStats:
    """Counts since the engine was made.

    Attributes:
        num_steps, num_tokens: dispatched.
    """

    num_steps: int = 0
    num_tokens: int = 0


class Engine:
    """Requests in, finished requests out; everything about text and files is left to its caller.

    Args:
        schedulers: one a replica; each request goes to the one with the fewest unfinished sequences.
        eos_token_ids: tokens that end a sequence unless it ignores them.
        tokenizer: for text that is needed token by token: stop strings, streams.
        max_logprobs: most that a request's `logprobs` may ask for.
        seed: draws the seeds of requests that bring none.
    """

    def __init__(
        self,
        schedulers: Iterable[Scheduler],
        runner: Runner,
        *,
        max_model_len: int,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        tokenizer: Any = None,
        max_logprobs: int = 20,
        seed: int = 0,
    ) -> None:
        self.replicas = [Replica(scheduler, max_model_len) for scheduler in schedulers]
        self.runner = runner
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.stats = EngineStats()
        self._eos_ids = frozenset(eos_token_ids)
        self._tokenizer = tokenizer
        self._max_logprobs = max_logprobs
        self._grammars = GrammarCompiler(tokenizer, vocab_size, self._eos_ids)
        self._seeds = np.random.default_rng(seed)
        self._request_ids = itertools.count()
        self._seq_ids = itertools.count()
        self._detokenizers: dict[int, Detokenizer] = {}
        self._homes: dict[int, Replica] = {}

    @property
    def scheduler(self) -> Scheduler:
        """The first replica's, and mostly the only one."""
        return self.replicas[0].scheduler

    @property
    def memory(self) -> MemoryManager:
        """The first replica's, and mostly the only one."""
        return self.replicas[0].memory

    def make_request(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams | BeamSearchParams,
        prompt: str | None = None,
        *,
        priority: int | None = None,
        cache_salt: str | None = None,
        streamed: bool = False,
    ) -> Request:
        """A request, checked but not queued; see `Request` for the optional arguments.

        Raises:
            ValueError: the prompt is empty, holds an id outside the vocabulary, or leaves no room for a token; or
                there are more outputs than max_num_seqs; or a beam search is streamed or needs more candidates than
                the vocabulary has tokens.
        """
        beam_params = None
        if isinstance(params, BeamSearchParams):
            beam_params, params = params, params.sampling_params()
        count = len(prompt_token_ids)
        if count == 0:
            raise ValueError("the prompt has 0 tokens; at least 1 is needed")
        if count >= self.max_model_len:
            raise ValueError(
                f"the prompt has {count} tokens, which leaves no room for output within "
                f"max_model_len={self.max_model_len}"
            )
        check_token_ids("prompt_token_ids", (min(prompt_token_ids), max(prompt_token_ids)), self.vocab_size)
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            check_token_ids(name, getattr(params, name) or (), self.vocab_size)
        if params.prompt_logprobs is not None and len(self.replicas) > 1:
            raise ValueError(
                f"prompt_logprobs={params.prompt_logprobs} needs data_parallel_size=1, not {len(self.replicas)}"
            )
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(params, name) or 0) > self._max_logprobs:
                raise ValueError(
                    f"{name}={getattr(params, name)} is above the engine's max_logprobs={self._max_logprobs}"
                )
        if params.stop_strings and self._tokenizer is None:
            raise ValueError(f"stop={params.stop_strings!r} needs a tokenizer, and the model has none")
        if params.n > self.scheduler.max_num_seqs:
            name = "n" if beam_params is None else "beam_width"
            raise ValueError(f"{name}={params.n} is above max_num_seqs={self.scheduler.max_num_seqs}")
        most = self.max_model_len - count
        max_tokens = most if params.max_tokens is None else min(params.max_tokens, most)
        seed = params.seed if params.seed is not None else int(self._seeds.integers(2**63))
        eos = frozenset() if params.ignore_eos else self._eos_ids
        stop_ids = eos | frozenset(params.stop_token_ids)
        bad_words = bad_word_tokens(params, self._tokenizer)
        check_tokens_left(params, self.vocab_size, stop_ids, bad_words)
        request = Request(
            request_id=next(self._request_ids),
            prompt_token_ids=prompt_token_ids,
            params=params,
            seed=seed,
            max_total_tokens=count + max_tokens,
            stop_ids=stop_ids,
            eos_ids=eos,
            sequences=[Sequence(next(self._seq_ids), i, list(prompt_token_ids), count) for i in range(params.n)],
            prompt=prompt,
            priority=priority,
            cache_salt=cache_salt,
            streamed=streamed,
            bad_words=bad_words,
            allowed_mask=allowed_mask(params, self.vocab_size),
            beam=None if beam_params is None else self._beam_search(beam_params, max_tokens, eos, streamed),
        )
        if params.structured_outputs is not None:
            for seq in request.sequences:
                seq.grammar = self._grammars.compile(params.structured_outputs)
        if request.needs_text and self._tokenizer is not None and not hasattr(self._tokenizer, "backend_tokenizer"):
            raise ValueError(
                f"stop strings and streams need a tokenizer with a tokenizer.json, not {type(self._tokenizer).__name__}"
            )
        return request

    def _beam_search(
        self, params: BeamSearchParams, max_tokens: int, eos: frozenset[int], streamed: bool
    ) -> BeamSearch:
        if streamed:
            raise ValueError(f"beam_width={params.beam_width}: a beam search has no output to stream before its end")
        beam = BeamSearch(params, max_tokens, eos)
        if beam.num_candidates > self.vocab_size:
            raise ValueError(
                f"beam_width={params.beam_width} needs {beam.num_candidates} candidates of each beam, and the "
                f"vocabulary has {self.vocab_size}"
            )
        return beam

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ValueError: it could never fit the pool.
        """
        self._add_to(min(self.replicas, key=lambda replica: replica.load), request)

    def _add_to(self, replica: Replica, request: Request) -> None:
        replica.add(request)
        self._homes[request.request_id] = replica
        if request.needs_text and self._tokenizer is not None:
            for seq in request.sequences:
                self._detokenizers[seq.seq_id] = Detokenizer(self._tokenizer, request.params)

    @property
    def has_work(self) -> bool:
        return any(replica.has_work for replica in self.replicas)

    def step(self) -> list[Request]:
        """Dispatch the next step of all replicas, then take in the one before; returns the requests that finished."""
        scheduled = [replica.scheduler.schedule() for replica in self.replicas]
        dispatched = self.runner.dispatch_all(scheduled)
        self.stats.num_steps += any(step.chunks for step in scheduled)
        self.stats.num_tokens += sum(step.num_tokens for step in scheduled)
        finished = []
        for replica, step, in_flight in zip(self.replicas, scheduled, dispatched, strict=True):
            replica.watch_memory(step)
            finished += self._read_back(replica)
            replica.in_flight = in_flight
        return finished

    def reset_peak(self) -> None:
        """Forget the busiest step of each replica."""
        for replica in self.replicas:
            replica.reset_peak()

    def _read_back(self, replica: Replica) -> list[Request]:
        if replica.in_flight is None:
            return []
        step, scores = replica.in_flight.step, replica.in_flight.scores
        if scores is not None:
            for (request, position), logprob, ranking in scores.wait():
                request.prompt_logprobs[position] = logprob, ranking
        finished = replica.scheduler.update(step, *replica.in_flight.wait())
        if self._detokenizers:
            finished += [request for request, seq, _ in step.samples if self._extend_text(request, seq)]
        for request in finished:
            self._homes.pop(request.request_id).let_go(request)
        return finished

    def _extend_text(self, request: Request, seq: Sequence) -> bool:
        """Take a sequence's new token into its text; True when a stop string in it ended the request."""
        detokenizer = self._detokenizers.get(seq.seq_id)
        if detokenizer is None:
            return False
        found = detokenizer.push(request.text_tokens(seq, detokenizer.num_tokens))
        if found is None and seq.finish_reason is not None:
            found = detokenizer.finish()
        ended = False
        if found is not None and seq.finish_reason is None:
            ended = self._homes[request.request_id].scheduler.finish(request, seq, "stop", found)
        if found is not None:
            seq.finish_reason, seq.stop_reason = "stop", found
        seq.text, seq.num_settled = detokenizer.text, detokenizer.num_settled
        if seq.finish_reason is not None:
            del self._detokenizers[seq.seq_id]
        return ended

    def pin_prefix(self, token_ids: list[int], cache_salt: str | None = None) -> tuple[int, int]:
        """Keep the KV of a prefix, computed if need be, in each replica's pool; (id for `unpin`, tokens that are kept).

        Raises:
            ValueError: as `Pins.pin` or `make_request`; then nothing is pinned.
            RuntimeError: requests are running, which were promised the memory.
        """
        if self.has_work:
            raise RuntimeError("pin_prefix() while requests run")
        length, seq_id = self.replicas[0].pins.length(len(token_ids)), next(self._seq_ids)
        once = SamplingParams(temperature=0.0, seed=0, max_tokens=1)
        requests = [self.make_request(token_ids, once, cache_salt=cache_salt) for _ in self.replicas]
        try:
            missing = [replica for replica in self.replicas if not replica.pins.pin(seq_id, token_ids, cache_salt)]
            for replica, request in zip(missing, requests, strict=False):
                self._add_to(replica, request)
            while self.has_work:
                self.step()
            if not all(replica.pins.pin(seq_id, token_ids, cache_salt) for replica in missing):
                raise ValueError(f"{length} tokens are more than the pool can cache at once")
        except ValueError:
            self._unpin_everywhere(seq_id)
            raise
        return seq_id, length

    def unpin(self, seq_id: int) -> None:
        """Let a prefix be evicted again, in every replica.

        Raises:
            ValueError: nothing is pinned under this id.
        """
        self.replicas[0].pins.unpin(seq_id)
        self._unpin_everywhere(seq_id)

    def _unpin_everywhere(self, seq_id: int) -> None:
        for replica in self.replicas:
            if seq_id in replica.pins.seq_ids:
                replica.pins.unpin(seq_id)

    def abort(self, request: Request) -> None:
        """Drop a request; its blocks are free at once."""
        for seq in request.sequences:
            self._detokenizers.pop(seq.seq_id, None)
        home = self._homes.pop(request.request_id, None)
        if home is not None:
            home.scheduler.abort(request)
            home.let_go(request)

    def drain(self) -> None:
        """Wait for the step in flight and take it in."""
        for replica in self.replicas:
            self._read_back(replica)
            replica.in_flight = None
