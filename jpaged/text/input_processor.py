"""Prompts and parameters made into requests, in the caller's thread."""

from __future__ import annotations

import contextlib
import copy
import json
import threading
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from jpaged.sampling_params import BeamSearchParams, SamplingParams
from jpaged.scheduling import BeamSearch, Request, Sequence
from jpaged.structured_outputs import StructuredOutputsParams
from jpaged.text.adapters import AdapterSource, LoRA, NoAdapters
from jpaged.text.combined_rules import CombinedRules, Limits
from jpaged.text.detokenizer import Detokenizer
from jpaged.text.grammar import Grammar, GrammarCompiler
from jpaged.text.images import ImageInputs
from jpaged.text.prompt import DEFAULT, Conversation, ParsedPrompt, Prompt, Tokenization, check_salt, parse_prompt
from jpaged.text.token_constraints import allowed_mask, bad_word_tokens, check_token_ids, check_tokens_left

PREFILL_ONLY = SamplingParams(temperature=0.0, seed=0, max_tokens=1)
"""Parameters of a request that is run for the KV of its prompt."""


class InputProcessor:
    """Makes requests for one engine; any number of threads may do so at once.

    Args:
        tokenizer: a transformers tokenizer; None where the model has none.
        vocab_size: ids of tokens that can be drawn are below it.
        prompt_vocab_size: ids of a prompt's tokens are below it; None = `vocab_size`.
        max_model_len: most tokens of a sequence, prompt and output.
        max_num_seqs: most sequences that run at once.
        eos_token_ids: tokens that end a sequence unless it ignores them.
        max_logprobs: most that a request's `logprobs` may ask for; -1 = the whole vocabulary.
        data_parallel_size: replicas of the engine.
        seed: draws the seeds of requests that bring none.
        images: prepares images; None = none are taken.
        adapters: finds low-rank adapters; None = there are none.
        no_output: why the model generates nothing; None = it does.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        vocab_size: int,
        max_model_len: int,
        max_num_seqs: int,
        eos_token_ids: Collection[int] = (),
        max_logprobs: int = 20,
        data_parallel_size: int = 1,
        seed: int = 0,
        images: ImageInputs | None = None,
        prompt_vocab_size: int | None = None,
        no_output: str | None = None,
        adapters: AdapterSource | None = None,
    ) -> None:
        self.adapters = adapters or NoAdapters()
        self.images = images or ImageInputs()
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self._prompt_vocab_size = prompt_vocab_size or vocab_size
        self._no_output = no_output
        self.max_model_len = max_model_len
        self.max_num_seqs = max_num_seqs
        self.eos_ids = frozenset(eos_token_ids)
        self._max_logprobs = max_logprobs
        self._data_parallel_size = data_parallel_size
        self._grammars = GrammarCompiler(tokenizer, vocab_size, self.eos_ids)
        self._seeds = np.random.default_rng(seed)
        self._lock = threading.Lock()  # of the seeds and the two counts
        self._num_requests = 0  # ids given so far
        self._num_sequences = 0

    # ------------------------------------------------------------------ requests

    def process(
        self,
        prompt: Prompt | Conversation,
        params: SamplingParams | BeamSearchParams,
        priority: int | None = None,
        *,
        streamed: bool = False,
        tokenization: Tokenization = DEFAULT,
        lora: LoRA | None = None,
    ) -> Request:
        """Make a request, checked in all that does not depend on what else runs.

        Args:
            priority: see `Request`.
            streamed: somebody reads its outputs while they are generated.
            tokenization: how its text becomes tokens.
            lora: the low-rank adapter that it runs with.

        Raises:
            ValueError: the model generates nothing; the prompt has none of the forms of `parse_prompt`, is empty, holds
                an id outside the vocabulary, or leaves no room for a token; or a parameter is not for this model or
                engine.
        """
        if self._no_output is not None:
            raise ValueError(self._no_output)
        parsed = parse_prompt(prompt, self.tokenizer, tokenization, self.images)
        return self.request(parsed, params, priority, streamed=streamed, lora=lora)

    def prefix(self, prompt: Prompt, cache_salt: str | None) -> ParsedPrompt:
        """Parse a prompt whose salt may be given beside it.

        Raises:
            ValueError: the two salts differ, or the prompt has none of the forms of `parse_prompt`.
        """
        check_salt(cache_salt)
        parsed = parse_prompt(prompt, self.tokenizer, images=self.images)
        if cache_salt is not None and parsed.cache_salt not in (None, cache_salt):
            raise ValueError(f"cache_salt={cache_salt!r} is not the prompt's own, {parsed.cache_salt!r}")
        images = parsed.images
        if cache_salt is not None and parsed.cache_salt is None:
            images = tuple(image.salted(cache_salt) for image in images)
        return replace(parsed, cache_salt=cache_salt or parsed.cache_salt, images=images)

    def request(
        self,
        prompt: ParsedPrompt,
        params: SamplingParams | BeamSearchParams,
        priority: int | None = None,
        *,
        streamed: bool = False,
        lora: LoRA | None = None,
    ) -> Request:
        """Make a request for a prompt that was parsed; see `process`."""
        adapter = None if lora is None else self.adapters.find(lora)
        beam_params = None
        if isinstance(params, BeamSearchParams):
            beam_params, params = params, params.sampling_params()
        params = self._resolved(params)
        token_ids = self._truncated(prompt.token_ids, params)
        if prompt.images and len(token_ids) < len(prompt.token_ids):
            raise ValueError(
                f"the prompt has {len(prompt.token_ids)} tokens, those of its images included, and "
                f"truncate_prompt_tokens={params.truncate_prompt_tokens} would cut it: prompts with images are not cut"
            )
        count = len(token_ids)
        self._check_prompt(token_ids)
        self._check_params(params)
        room = self.max_model_len - count
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        eos = frozenset() if params.ignore_eos else self.eos_ids
        stop_ids = eos | frozenset(params.stop_token_ids)
        seed, request_ids, seq_ids = self._draw(params)
        bad_words = bad_word_tokens(params, self.tokenizer)
        check_tokens_left(params, self.vocab_size, stop_ids, bad_words)
        sequences = [Sequence(seq_id, i, list(token_ids), count) for i, seq_id in enumerate(seq_ids)]
        request = Request(
            request_id=request_ids[0],
            prompt_token_ids=token_ids,
            params=params,
            seed=seed,
            max_total_tokens=count + max_tokens,
            stop_ids=stop_ids,
            eos_ids=eos,
            sequences=sequences[: self.max_num_seqs],
            prompt=prompt.text,
            priority=priority,
            cache_salt=prompt.cache_salt,
            bad_words=bad_words,
            allowed_mask=allowed_mask(params, self.vocab_size),
            encoder_tokens=max((image.features for image in prompt.images), default=0),
            images=prompt.images,
            adapter=adapter,
            beam=None if beam_params is None else self._beam_search(beam_params, max_tokens, eos, streamed),
        )
        request.later = self._later(request, request_ids[1:], sequences[self.max_num_seqs :])
        self._attach(request, streamed)
        return request

    def _later(self, request: Request, request_ids: list[int], sequences: list[Sequence]) -> list[Request]:
        """Make requests for outputs that are more than may run at once; they do not score the prompt again."""
        params, width = replace(request.params, prompt_logprobs=None), self.max_num_seqs
        return [
            replace(
                request, request_id=request_id, sequences=sequences[i * width : (i + 1) * width], params=params, held={}
            )
            for i, request_id in enumerate(request_ids)
        ]

    def prepare(self) -> None:
        """Do now what the first request with structured_outputs would do, and hold the interpreter for a second."""
        with contextlib.suppress(ValueError):  # such a request will be told
            self._grammars.prepare()

    def new_seq_id(self) -> int:
        """Return a sequence id that nothing else has."""
        with self._lock:
            return self._next_seq_id()

    def _draw(self, params: SamplingParams) -> tuple[int, list[int], list[int]]:
        """Return a request's seed, an id for each of its turns, and the ids of its sequences."""
        turns = -(-params.n // self.max_num_seqs)
        with self._lock:
            seed = int(self._seeds.integers(2**63)) if params.seed is None else params.seed
            first, self._num_requests = self._num_requests, self._num_requests + turns
            return seed, list(range(first, first + turns)), [self._next_seq_id() for _ in range(params.n)]

    def _next_seq_id(self) -> int:
        self._num_sequences += 1
        return self._num_sequences - 1

    def _resolved(self, params: SamplingParams) -> SamplingParams:
        """Copy the parameters, which the caller may go on changing, with numbers for what -1 stands for."""
        names = [name for name in ("logprobs", "prompt_logprobs") if getattr(params, name) == -1]
        whole: dict[str, Any] = dict.fromkeys(names, self.vocab_size)
        return replace(params, **whole) if whole else copy.copy(params)

    def _truncated(self, token_ids: list[int], params: SamplingParams) -> list[int]:
        """Return the last tokens of a prompt, as many as the parameters ask for."""
        most = params.truncate_prompt_tokens
        if most is None:
            return token_ids
        if most > self.max_model_len:
            raise ValueError(f"truncate_prompt_tokens={most} is above max_model_len={self.max_model_len}")
        if most == -1:
            most = max(1, self.max_model_len - (params.max_tokens or 1))
        return token_ids[-most:]

    def _attach(self, request: Request, streamed: bool) -> None:
        """Give the request's sequences what looks at their tokens."""
        params = request.params
        sequences = [seq for part in request.parts for seq in part.sequences]
        if params.structured_outputs is not None:
            rules = self._rules(request, params.structured_outputs)
            for seq in sequences:
                seq.grammar = rules if seq.index == 0 else rules.copy()
        if self.tokenizer is None or not params.detokenize or not (streamed or params.stop_strings):
            return
        if not hasattr(self.tokenizer, "backend_tokenizer"):
            raise ValueError(
                f"stop strings and streams need a tokenizer with a tokenizer.json, not {type(self.tokenizer).__name__}"
            )
        if params.stop_strings:
            for seq in sequences:
                seq.stop_search = Detokenizer(self.tokenizer, params, request.prompt_token_ids)

    def _rules(self, request: Request, structure: StructuredOutputsParams) -> Grammar | CombinedRules:
        """Make the rules of the request's shape, less what its other parameters forbid."""
        grammar, params = self._grammars.compile(structure), request.params
        if not (params.min_tokens or params.ignore_eos or request.bad_words or request.allowed_mask is not None):
            return grammar
        limits = Limits(
            self.vocab_size,
            allowed=request.allowed_mask,
            bad_words=request.bad_words,
            never=self.eos_ids if params.ignore_eos else (),
            late=request.stop_ids,
            min_tokens=params.min_tokens,
            endings=self.eos_ids,
        )
        return CombinedRules(grammar, limits)

    # ------------------------------------------------------------------ what a saved state has of it

    def data(self) -> dict[str, Any]:
        """Return which ids were given and how far the seeds are drawn, as plain data."""
        with self._lock:
            state = self._seeds.bit_generator.state
            return {"requests": self._num_requests, "sequences": self._num_sequences, "seeds": json.dumps(state)}

    def load(self, data: Mapping[str, Any]) -> None:
        """Go on where another processor was: no id is given again, and seeds are drawn from there on."""
        with self._lock:
            self._num_requests = max(self._num_requests, data["requests"])
            self._num_sequences = max(self._num_sequences, data["sequences"])
            self._seeds.bit_generator.state = json.loads(data["seeds"])

    def look_again(self, request: Request) -> None:
        """Give the sequences of a request that was saved what looks at their tokens, and show it these.

        Raises:
            ValueError: this model's tokenizer cannot be used for what the request asks, or its adapter is not here.
        """
        for part in request.parts:
            if part.saved_adapter is not None:
                part.adapter, part.saved_adapter = self.adapters.restored(*part.saved_adapter), None
        self._attach(request, streamed=False)
        for seq in (seq for part in request.parts for seq in part.sequences):
            if seq.grammar is not None:
                seq.grammar.restart(seq.output_token_ids)
            if seq.stop_search is not None:
                hidden = seq.num_output > 0 and request.hides_last(seq, seq.finish_reason)
                found = seq.stop_search.push(seq.token_ids[seq.num_prompt : len(seq.token_ids) - hidden])
                # Whoever aborts a sequence leaves its text as it is; every other end settles it.
                if found is None and seq.finished and (seq.finish_reason, seq.stop_reason) != ("abort", None):
                    seq.stop_search.finish()

    # ------------------------------------------------------------------ checks

    def _check_prompt(self, token_ids: list[int]) -> None:
        if not token_ids:
            raise ValueError("the prompt has 0 tokens; at least 1 is needed")
        if len(token_ids) >= self.max_model_len:
            raise ValueError(
                f"the prompt has {len(token_ids)} tokens, which leaves no room for output within "
                f"max_model_len={self.max_model_len}"
            )
        check_token_ids("prompt_token_ids", (min(token_ids), max(token_ids)), self._prompt_vocab_size)

    def _check_params(self, params: SamplingParams) -> None:
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            check_token_ids(name, getattr(params, name) or (), self.vocab_size)
        if params.prompt_logprobs is not None and self._data_parallel_size > 1:
            raise ValueError(
                f"prompt_logprobs={params.prompt_logprobs} needs data_parallel_size=1, not {self._data_parallel_size}"
            )
        most = self.vocab_size if self._max_logprobs == -1 else self._max_logprobs
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(params, name) or 0) > most:
                raise ValueError(f"{name}={getattr(params, name)} is above the engine's max_logprobs={most}")
        if params.stop_strings and self.tokenizer is None:
            raise ValueError(f"stop={params.stop_strings!r} needs a tokenizer, and the model has none")

    def _beam_search(
        self, params: BeamSearchParams, max_tokens: int, eos: frozenset[int], streamed: bool
    ) -> BeamSearch:
        if streamed:
            raise ValueError(f"beam_width={params.beam_width}: a beam search has no output to stream before its end")
        if params.beam_width > self.max_num_seqs:
            raise ValueError(f"beam_width={params.beam_width} is above max_num_seqs={self.max_num_seqs}")
        beam = BeamSearch(params, max_tokens, eos)
        if beam.num_candidates > self.vocab_size:
            raise ValueError(
                f"beam_width={params.beam_width} needs {beam.num_candidates} candidates of each beam, and the "
                f"vocabulary has {self.vocab_size}"
            )
        return beam
