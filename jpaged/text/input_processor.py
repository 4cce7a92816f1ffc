"""Turns prompts and parameters into requests, in the caller's thread: numbers them, and checks their tokens."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from jaxtyping import Int

from jpaged.cache_retention import after_cut
from jpaged.reasoning_config import ReasoningConfig
from jpaged.sampling_params import BeamSearchParams, SamplingParams
from jpaged.scheduling import BeamSearch, Request, Sequence
from jpaged.scheduling.inputs import SavedAdapter, asks_for
from jpaged.short_values import short_values
from jpaged.text.adapters import AdapterSource, LoRA, NoAdapters
from jpaged.text.images import ImageInputs
from jpaged.text.long_text import TokenBound
from jpaged.text.prompt import DEFAULT, Conversation, ParsedPrompt, Prompt, Tokenization, check_salt, parse_prompt
from jpaged.text.token_hooks import TokenHooks, packed_bits

PREFILL_ONLY = SamplingParams(temperature=0.0, seed=0, max_tokens=1)
"""Parameters of a request that is run for the KV of its prompt."""


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

    def reassign_ids(self, request: Request) -> None:
        """Give a request new ids if it was made before others' ids were loaded, which may be its own; its parts too."""
        with self._lock:
            if request.request_id >= self._num_loaded:
                return
            for part in request.all_requests:
                part.request_id, self._num_requests = self._num_requests, self._num_requests + 1
                for seq in part.sequences:
                    seq.seq_id = self._next_seq_id()


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
        seed: draws the seeds of requests that bring none.
        images: prepares images; None = none are taken.
        adapters: finds low-rank adapters; None = there are none.
        no_output: why the model generates nothing; None = it does.
        keeps_ends: whether prompts of messages name the messages' ends, see `chat_prompt`.
        reasoning: how thoughts end; None = by their marks alone.
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
        seed: int = 0,
        images: ImageInputs | None = None,
        prompt_vocab_size: int | None = None,
        no_output: str | None = None,
        adapters: AdapterSource | None = None,
        keeps_ends: bool = False,
        reasoning: ReasoningConfig | None = None,
    ) -> None:
        self.keeps_ends = keeps_ends
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
        self.reasoning = reasoning or ReasoningConfig()
        self._hooks = TokenHooks(tokenizer, vocab_size, self.eos_ids, self.reasoning.reasoning_start_str)
        self._ids = RequestIds(seed)

    # ------------------------------------------------------------------ requests

    @short_values()
    def process(
        self,
        prompt: Prompt | Conversation,
        params: SamplingParams | BeamSearchParams,
        priority: int | None = None,
        *,
        streamed: bool = False,
        tokenization: Tokenization = DEFAULT,
        lora: LoRA | None = None,
        prefill_only: bool = False,
    ) -> Request:
        """Make a request, with all checks that do not depend on other requests.

        Args:
            priority: see `Request`.
            streamed: somebody reads its outputs while they are generated.
            tokenization: how its text becomes tokens.
            lora: the low-rank adapter that it runs with.
            prefill_only: the one token that it draws is dropped, so that its prompt may fill max_model_len.

        Raises:
            ValueError: the model generates nothing; the prompt has none of the forms of `parse_prompt`, is empty, holds
                an id outside the vocabulary, is too long, or leaves no room for a token that is to be read; or a
                parameter is not for this model or engine.
        """
        if self._no_output is not None:
            raise ValueError(self._no_output)
        bound = self.bound(params.truncate_prompt_tokens if isinstance(params, SamplingParams) else None, tokenization)
        parsed = parse_prompt(
            prompt, self.tokenizer, tokenization, self.images, bound=bound, keeps_ends=self.keeps_ends
        )
        return self.request(parsed, params, priority, streamed=streamed, lora=lora, prefill_only=prefill_only)

    def bound(self, truncate_prompt_tokens: int | None = None, tokenization: Tokenization = DEFAULT) -> TokenBound:
        """Return the limit on a prompt's tokens.

        Args:
            truncate_prompt_tokens: see `SamplingParams`.
        """
        most = self.max_model_len
        given = (truncate_prompt_tokens or 0, tokenization.max_length or 0)
        cuts = [most if cut == -1 else cut for cut in given if cut > 0 or cut == -1]
        last = min(cuts, default=most + 1)
        return TokenBound(most, last=last if last <= most else None)

    @short_values()
    def prefix(self, prompt: Prompt, cache_salt: str | None) -> ParsedPrompt:
        """Parse a prompt whose salt may be a separate argument.

        Raises:
            ValueError: the two salts differ, or the prompt has none of the forms of `parse_prompt`.
        """
        check_salt(cache_salt)
        parsed = parse_prompt(prompt, self.tokenizer, images=self.images, bound=self.bound())
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
        prefill_only: bool = False,
    ) -> Request:
        """Make a request for a prompt that was parsed; see `process`."""
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
        self._check_prompt(token_ids, prefill_only)
        self._check_params(params)
        room = 1 if prefill_only else self.max_model_len - count  # the last token that is drawn is never computed
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        eos = frozenset() if params.ignore_eos else self.eos_ids
        stop_ids = eos | frozenset(params.stop_token_ids)
        bad_words = bad_word_tokens(params, self.tokenizer)
        check_tokens_left(params, self.vocab_size, stop_ids, bad_words)
        adapter = None if lora is None else self.adapters.find(lora)  # last, as it may read a folder
        seed, request_ids, seq_ids = self._ids.draw(params, -(-params.n // self.max_num_seqs))
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
            retention=after_cut(prompt.retention, len(prompt.token_ids) - count),
            prefix_ends=self._ends_within(prompt, len(token_ids)),
            bad_words=bad_words,
            allowed_mask=allowed_mask(params, self.vocab_size),
            asks=asks_for(prompt.images, adapter),
            beam=None if beam_params is None else self._beam_search(beam_params, max_tokens, eos, streamed),
        )
        request.overflow_requests = self._later(request, request_ids[1:], sequences[self.max_num_seqs :])
        self._hooks.attach(request, streamed=streamed)
        return request

    def _later(self, request: Request, request_ids: list[int], sequences: list[Sequence]) -> list[Request]:
        """Make requests for outputs that are more than may run at once; they do not score the prompt again."""
        if not request_ids:
            return []
        params, width = replace(request.params, prompt_logprobs=None), self.max_num_seqs
        return [
            replace(
                request,
                request_id=request_id,
                sequences=sequences[i * width : (i + 1) * width],
                params=params,
                prompt_logprobs={},
                held={},
                pause_times=[],
            )
            for i, request_id in enumerate(request_ids)
        ]

    def prepare(self) -> None:
        """Do now what the first request with structured_outputs would do, and hold the interpreter for a second."""
        self._hooks.prepare()

    def new_seq_id(self) -> int:
        """Return a sequence id that nothing else has."""
        return self._ids.new_seq_id()

    def _resolved(self, params: SamplingParams) -> SamplingParams:
        """Copy the parameters, as the caller may change them later, replace each -1 by the number that it stands for,
        and take from the engine's settings how thoughts end.

        Raises:
            ValueError: more log-probabilities are asked for than the engine gives.
        """
        most = self.vocab_size if self._max_logprobs == -1 else self._max_logprobs
        whole: dict[str, Any] = {**self.reasoning.missing_in(params)}
        for name in ("logprobs", "prompt_logprobs"):
            asked = getattr(params, name) or 0
            if asked == -1:
                whole[name] = self.vocab_size
            if whole.get(name, asked) > most:
                every = f", all {self.vocab_size} tokens," if asked == -1 else ""
                limit = f"the engine's max_logprobs={most}; max_logprobs=-1 allows all"
                raise ValueError(f"{name}={asked}{every} is above {limit}")
        return replace(params, **whole) if whole else copy.copy(params)

    def _ends_within(self, prompt: ParsedPrompt, count: int) -> tuple[int, ...]:
        """Return the ends of a prompt's prefixes within its last `count` tokens.

        Raises:
            ValueError: one is after the prompt's own end.
        """
        length = len(prompt.token_ids)
        if prompt.prefix_ends and max(prompt.prefix_ends) > length:
            raise ValueError(f"prefix_ends={list(prompt.prefix_ends)} ends after the prompt's {length} tokens")
        cut = length - count
        return tuple(end - cut for end in prompt.prefix_ends if end > cut)

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

    # ------------------------------------------------------------------ saved requests

    def data(self) -> dict[str, Any]:
        """Return which ids were given and how far the seeds are drawn, as plain data."""
        return self._ids.data()

    def load(self, data: Mapping[str, Any]) -> None:
        """Go on where another processor was: no id is given again, and seeds are drawn from there on."""
        self._ids.load(data)

    def reassign_ids(self, request: Request) -> None:
        """Give a request that was made before `load`, and that no engine has yet, ids that nothing else has."""
        self._ids.reassign_ids(request)

    def look_again(self, request: Request) -> None:
        """Attach the token hooks of a saved request to its sequences, and show them the tokens so far.

        Raises:
            ValueError: this model's tokenizer cannot be used for the request's settings, or its adapter is missing.
        """
        for part in request.all_requests:
            part.asks |= {
                kind: self.adapters.restored(*asked)
                for kind, asked in part.asks.items()
                if isinstance(asked, SavedAdapter)
            }
        self._hooks.attach_again(request)

    # ------------------------------------------------------------------ checks

    def _check_prompt(self, token_ids: list[int], prefill_only: bool) -> None:
        if not token_ids:
            raise ValueError("the prompt has 0 tokens; at least 1 is needed")
        if prefill_only and len(token_ids) > self.max_model_len:
            raise ValueError(f"the prompt has {len(token_ids)} tokens, above max_model_len={self.max_model_len}")
        if not prefill_only and len(token_ids) >= self.max_model_len:
            raise ValueError(
                f"the prompt has {len(token_ids)} tokens, which leaves no room for output within "
                f"max_model_len={self.max_model_len}"
            )
        check_token_ids("prompt_token_ids", (min(token_ids), max(token_ids)), self._prompt_vocab_size)

    def _check_params(self, params: SamplingParams) -> None:
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            check_token_ids(name, getattr(params, name) or (), self.vocab_size)
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


def check_token_ids(name: str, tokens: Iterable[int], vocab_size: int) -> None:
    """Refuse token ids that the model does not have.

    Raises:
        ValueError: one of the tokens that the parameter `name` holds is outside the vocabulary.
    """
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise ValueError(f"{name}: token id {token} is outside the vocabulary [0, {vocab_size})")


def bad_word_tokens(params: SamplingParams, tokenizer: Any) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences of `bad_words`: each word once where it begins a text and once after a space.

    Raises:
        ValueError: there is no tokenizer, or a word has no tokens.
    """
    if params.bad_words and tokenizer is None:
        raise ValueError(f"bad_words={params.bad_words!r} needs a tokenizer, and the model has none")
    found = {}
    for word in params.bad_words:
        for text in (word.lstrip(), " " + word.lstrip()):
            tokens = tuple(tokenizer.encode(text, add_special_tokens=False)) if text.strip() else ()
            if not tokens:
                raise ValueError(f"bad_words has {word!r}, which has no tokens")
            found[tokens] = True
    return tuple(found)


def check_tokens_left(
    params: SamplingParams, vocab_size: int, stop_ids: Iterable[int], bad_words: Iterable[tuple[int, ...]]
) -> None:
    """Refuse parameters that could ban every token.

    Raises:
        ValueError: bad_words, or stop tokens before min_tokens, could leave no token to draw.
    """
    banned = {word[-1] for word in bad_words}
    if params.min_tokens:
        banned.update(stop_ids)
    if params.allowed_token_ids is not None and banned.issuperset(params.allowed_token_ids):
        raise ValueError(
            f"allowed_token_ids={params.allowed_token_ids} may leave no token to draw with "
            f"bad_words={params.bad_words} and min_tokens={params.min_tokens}"
        )
    if banned.issuperset(range(vocab_size)):
        raise ValueError(
            f"min_tokens={params.min_tokens} with {len(params.stop_token_ids)} stop_token_ids and "
            f"{len(params.bad_words)} bad_words may leave no token of {vocab_size} to draw"
        )


def allowed_mask(params: SamplingParams, vocab_size: int) -> Int[np.ndarray, " words"] | None:
    """Return the packed bits of `allowed_token_ids`, 32 tokens a word, lowest bit first; None = all."""
    return None if params.allowed_token_ids is None else packed_bits(params.allowed_token_ids, vocab_size)
