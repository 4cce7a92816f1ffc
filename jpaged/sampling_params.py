"""What a user asks of the sampler. Every field works or its value is refused with a ValueError."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jpaged.checks import boolean, integer, number, several, texts
from jpaged.structured_outputs import StructuredOutputsParams

_NUMBERS = (  # name, least, most, whether the least is out of range
    ("temperature", 0.0, 1e30, False),
    ("top_p", 0.0, 1.0, True),
    ("min_p", 0.0, 1.0, False),
    ("presence_penalty", -2.0, 2.0, False),
    ("frequency_penalty", -2.0, 2.0, False),
    ("repetition_penalty", 0.001, 1000.0, False),
)
_INTEGERS = (  # name, least, most
    ("n", 1, None),
    ("top_k", -1, None),
    ("max_tokens", 1, None),
    ("min_tokens", 0, None),
    ("seed", 0, 2**63 - 1),
    ("logprobs", 0, None),
    ("prompt_logprobs", 0, None),
)
_OPTIONAL = ("max_tokens", "seed", "logprobs", "prompt_logprobs")


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request's tokens are chosen and when it ends.

    Unknown names raise TypeError: nothing is accepted and ignored. Numbers may be NumPy's; they are stored as Python's.

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
        min_tokens: end-of-sequence and stop_token_ids cannot be drawn before this many tokens, and a stop string that
            appears before them does not end the sequence: it stays in the text.
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
        for name, low, high, open_low in _NUMBERS:
            self._store(name, number(name, getattr(self, name), low=low, high=high, open_low=open_low))
        for name, least, most in _INTEGERS:
            if getattr(self, name) is not None or name not in _OPTIONAL:
                self._store(name, integer(name, getattr(self, name), low=least, high=most))
        self._store_tokens()
        self._check_structure()
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens={self.min_tokens} is above max_tokens={self.max_tokens}")
        self._store("stop", texts("stop", (self.stop,) if isinstance(self.stop, str) else self.stop))
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "detokenize"):
            boolean(name, getattr(self, name))
        if self.stop and not self.detokenize:
            raise ValueError(f"stop={self.stop!r} needs text, and detokenize=False makes none")

    def _store(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

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

    def _store_tokens(self) -> None:
        for name in ("stop_token_ids", "allowed_token_ids"):
            tokens = getattr(self, name)
            if tokens is not None or name == "stop_token_ids":
                self._store(name, tuple(integer(name, token, low=0) for token in several(name, tokens)))
        if self.allowed_token_ids == ():
            raise ValueError("allowed_token_ids=() leaves no token to draw; None allows all")
        if isinstance(self.bad_words, str):
            raise ValueError(f"bad_words={self.bad_words!r} must be a list of strings")
        self._store("bad_words", texts("bad_words", self.bad_words))
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                raise ValueError(f"logit_bias={self.logit_bias!r} must map token ids to numbers")
            biases = {
                integer("token id in logit_bias", token, low=0): number(
                    f"logit_bias[{token}]", bias, low=-100.0, high=100.0
                )
                for token, bias in self.logit_bias.items()
            }
            self._store("logit_bias", biases)

    @property
    def penalised(self) -> bool:
        """Any of the three penalties changes a logit."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, however it was given."""
        return self.stop  # type: ignore[return-value]  # normalised in __post_init__
