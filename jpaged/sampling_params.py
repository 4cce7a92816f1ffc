"""What a user asks of the sampler. Every field works or its value is refused with a ValueError."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

from jpaged.structured_outputs import StructuredOutputsParams
from jpaged.unicode import check_unicode


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request's tokens are chosen and when it ends.

    Unknown names raise TypeError: nothing is accepted and ignored.

    Attributes:
        n: outputs to generate, which share the prompt's memory. Each needs one of the engine's max_num_seqs places
            and draws from a random stream of its own; output 0 is what n = 1 gives. At temperature 0 all are equal.
        temperature: 0 takes the most likely token; otherwise logits are divided by it; at most 1e30.
        top_k: keep the k most likely tokens (ties with the k-th are kept); 0 or -1 = all.
        top_p: keep the smallest set of most likely tokens whose probability reaches top_p; 1 = all.
        min_p: keep tokens at least min_p times as likely as the most likely; 0 = all.
        presence_penalty: subtracted from the logits of tokens that the output has; in [-2, 2].
        frequency_penalty: subtracted from a token's logit as often as the output has it; in [-2, 2].
        repetition_penalty: logits of tokens that prompt or output have are divided by it where positive and
            multiplied where negative; in [0.001, 1000], 1 = none.
        logit_bias: added to the logits of token ids, before the penalties; in [-100, 100].
        allowed_token_ids: the only tokens that can be drawn; None = all.
        bad_words: texts whose tokens, with and without a leading space, the output cannot hold.
        max_tokens: most tokens to generate; None = up to the engine's max_model_len.
        min_tokens: end-of-sequence and stop_token_ids cannot be drawn before this many tokens.
        seed: the sequence's random stream; None = drawn from the engine's seed, different for each request.
        stop: text that ends the sequence; it is cut from the text.
        stop_token_ids: tokens that end the sequence; they stay in token_ids.
        include_stop_str_in_output: leave the stop string, or the text of the token that ended the sequence, in the
            text.
        ignore_eos: go on after the model's end-of-sequence token.
        skip_special_tokens: leave special tokens out of the text.
        logprobs: how many of the most likely tokens are told with each generated token and its log-probability; None =
            none of it. Log-probabilities are the model's own: before temperature, truncation and edits.
        prompt_logprobs: the same for the prompt's tokens, but the first. Such a prompt reads no cached prefix.
        structured_outputs: the shape the text must have. The output ends where nothing can follow.
        detokenize: make text at all; False leaves it empty and allows no stop strings.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = field(default=())
    max_tokens: int | None = 16
    min_tokens: int = 0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] = field(default=())
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        _integer("n", self.n, low=1)
        _number("temperature", self.temperature, low=0.0, high=1e30)
        _integer("top_k", self.top_k, low=-1)
        _number("top_p", self.top_p, low=0.0, high=1.0, open_low=True)
        _number("min_p", self.min_p, low=0.0, high=1.0)
        _number("presence_penalty", self.presence_penalty, low=-2.0, high=2.0)
        _number("frequency_penalty", self.frequency_penalty, low=-2.0, high=2.0)
        _number("repetition_penalty", self.repetition_penalty, low=0.001, high=1000.0)
        self._check_tokens()
        self._check_structure()
        _integer("min_tokens", self.min_tokens, low=0)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, low=1)
            if self.min_tokens > self.max_tokens:
                raise ValueError(f"min_tokens={self.min_tokens} is above max_tokens={self.max_tokens}")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), low=0)
        if self.seed is not None:
            _integer("seed", self.seed, low=0, high=2**63 - 1)
        stop = _texts("stop", (self.stop,) if isinstance(self.stop, str) else self.stop)
        object.__setattr__(self, "stop", stop)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "detokenize"):
            _boolean(name, getattr(self, name))
        if stop and not self.detokenize:
            raise ValueError(f"stop={stop!r} needs text, and detokenize=False makes none")

    def _check_structure(self) -> None:
        wanted = self.structured_outputs
        if wanted is None:
            return
        if not isinstance(wanted, StructuredOutputsParams):
            raise ValueError(f"structured_outputs={wanted!r} must be StructuredOutputsParams")
        for name in ("min_tokens", "ignore_eos", "allowed_token_ids", "bad_words"):
            if getattr(self, name):
                raise ValueError(
                    f"{name}={getattr(self, name)!r} could leave structured_outputs no token to go on with"
                )

    def _check_tokens(self) -> None:
        object.__setattr__(self, "stop_token_ids", _several("stop_token_ids", self.stop_token_ids))
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, low=0)
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", _several("allowed_token_ids", self.allowed_token_ids))
            if not self.allowed_token_ids:
                raise ValueError("allowed_token_ids=() leaves no token to draw; None allows all")
            for token in self.allowed_token_ids:
                _integer("allowed_token_ids", token, low=0)
        if isinstance(self.bad_words, str):
            raise ValueError(f"bad_words={self.bad_words!r} must be a list of strings")
        object.__setattr__(self, "bad_words", _texts("bad_words", self.bad_words))
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                raise ValueError(f"logit_bias={self.logit_bias!r} must map token ids to numbers")
            object.__setattr__(self, "logit_bias", dict(self.logit_bias))
            for token, bias in self.logit_bias.items():
                _integer("token id in logit_bias", token, low=0)
                _number(f"logit_bias[{token}]", bias, low=-100.0, high=100.0)

    @property
    def penalised(self) -> bool:
        """Any of the three penalties changes a logit."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, however it was given."""
        return self.stop  # type: ignore[return-value]  # normalised in __post_init__


def _several(name: str, values: Iterable[Any] | None) -> tuple[Any, ...]:
    if values is not None and not isinstance(values, Iterable):
        raise ValueError(f"{name}={values!r} must be a list")
    return tuple(values or ())


def _texts(name: str, values: Iterable[str] | None) -> tuple[str, ...]:
    texts = _several(name, values)
    for text in texts:
        if not isinstance(text, str) or not text:
            raise ValueError(f"{name}={values!r} must be non-empty strings, got {text!r}")
        check_unicode(name, text)
    return texts


def _boolean(name: str, value: bool) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} must be True or False")


def _number(name: str, value: float, *, low: float, high: float, open_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or value in (inf, -inf) or value != value:
        raise ValueError(f"{name}={value!r} must be a finite number")
    if value < low or value > high or (open_low and value == low):
        bracket = "(" if open_low else "["
        raise ValueError(f"{name}={value} is outside {bracket}{low}, {high}]")


def _integer(name: str, value: int, *, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name}={value!r} must be an integer")
    if value < low or (high is not None and value > high):
        limit = f"at least {low}" if high is None else f"in [{low}, {high}]"
        raise ValueError(f"{name}={value} must be {limit}")
