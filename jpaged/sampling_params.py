"""Parameters of sampling and of beam search. Every field works, or its value is refused with a ValueError."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

from jpaged.short_tracebacks import short_init
from jpaged.short_values import shortened, shown
from jpaged.structured_outputs import StructuredOutputsParams
from jpaged.validation import (
    Check,
    boolean,
    did_you_mean,
    instance,
    integer,
    number,
    optional,
    real,
    several,
    switch,
    texts,
    whole,
)
from jpaged.vllm_refusals import name_in, refuse_parameters, with_vllms_attributes

MOST_OUTPUTS = 16384
"""Most outputs of one request, as in vLLM."""

MOST_STOPS = 64
"""Most strings of `stop`: each is searched for at every new token."""
MOST_STOP_CHARACTERS = 4096
"""Most characters of `stop` in all."""
MOST_BAD_WORDS = 1024
"""Most texts of `bad_words`: each is compared with the output's end at every new token."""
MOST_BAD_WORD_CHARACTERS = 65536
"""Most characters of `bad_words` in all."""


class RequestOutputKind(Enum):
    """The content of each output that `AsyncLLM.generate` yields."""

    CUMULATIVE = 0
    """Everything generated so far."""

    DELTA = 1
    """The text, tokens and log-probabilities generated since the previous output."""

    FINAL_ONLY = 2
    """Everything, in a single output at the end."""


Part = Literal["edit", "ends", "output", "random stream"]
"""Where a parameter acts: in an `Edit` of `jpaged.execution.sampling`, on when a sequence ends, on what the caller
gets, or on the random numbers."""


@dataclass(frozen=True)
class Parameter:
    """Describes a field of `SamplingParams` besides its name, type and default.

    Attributes:
        check: checks a value.
        part: where it acts. Importing the engine fails for an "edit" that no class reads.
    """

    check: Check
    part: Part


def parameter(default: Any, check: Check, part: Part) -> Any:
    """Return the dataclass field of a parameter; see `Parameter`."""
    return field(default=default, metadata={"parameter": Parameter(check, part)})


_PARAMETERS: dict[Any, Mapping[str, Parameter]] = {}


def parameters_of(params: type[SamplingParams]) -> Mapping[str, Parameter]:
    """Return the parameters of `SamplingParams` or of a class made of it, by name.

    Raises:
        TypeError: a field has no range and no place where it acts: `parameter` did not make it.
    """
    if (known := _PARAMETERS.get(params)) is not None:
        return known
    for each in fields(params):
        if "parameter" not in each.metadata:
            raise TypeError(
                f"{params.__name__}.{each.name} has no range and belongs nowhere: make the field by "
                f"parameter(default, check, part), where part is one of {', '.join(get_args(Part))}"
            )
    found = _PARAMETERS[params] = {each.name: each.metadata["parameter"] for each in fields(params)}
    return found


def integers(low: int, high: int | None = None) -> Check:
    """Take integers in [`low`, `high`], of any library, and floats that are integers; store Python's."""
    return lambda name, value: integer(name, whole(value), low=low, high=high)


def _seed(name: str, value: Any) -> int | None:
    unset = value is None or (type(value) is not bool and value == -1)
    return None if unset else integer(name, whole(value), low=0)


def _thought_budget(name: str, value: Any) -> int | None:
    budget = integer(name, whole(value), low=-1)
    return None if budget == -1 else budget


def _text(name: str, value: Any) -> str:
    return texts(name, (value,))[0]


def _tokens(name: str, value: Any) -> tuple[int, ...]:
    return tuple(integer(name, whole(token), low=0) for token in several(name, value))


def _allowed(name: str, value: Any) -> tuple[int, ...]:
    if not (tokens := _tokens(name, value)):
        raise ValueError(f"{name}=() leaves no token to draw; None allows all")
    return tokens


def _bias(name: str, value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{name}={shown(value)} must map token ids to numbers")
    return {
        integer(f"token id in {name}", whole(token), low=0): number(f"{name}[{token}]", bias, low=-100.0, high=100.0)
        for token, bias in value.items()
    }


def _bad_words(name: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        raise ValueError(f"{name}={shown(value)} must be a list of strings")
    return _checked_size(name, texts(name, value), MOST_BAD_WORDS, MOST_BAD_WORD_CHARACTERS)


def _stops(name: str, value: Any) -> tuple[str, ...]:
    found = texts(name, (value,) if isinstance(value, str) else value)
    return _checked_size(name, found, MOST_STOPS, MOST_STOP_CHARACTERS)


def _checked_size(name: str, given: tuple[str, ...], most: int, most_characters: int) -> tuple[str, ...]:
    if len(given) > most:
        raise ValueError(f"{name} has {len(given)} strings, the limit is {most}")
    if (characters := sum(map(len, given))) > most_characters:
        raise ValueError(f"{name} has {characters} characters in all, the limit is {most_characters}")
    return given


def _cut(name: str, value: Any) -> int:
    if not (cut := integer(name, whole(value), low=-1)):
        raise ValueError(f"{name}=0 must be at least 1, or -1 for what max_model_len has room for")
    return cut


@with_vllms_attributes
@short_init
@dataclass(kw_only=True)
class SamplingParams:
    """Controls how one request's tokens are chosen and when it ends.

    Unknown names raise TypeError: nothing is accepted and ignored. Numbers may be NumPy's; they are stored as Python's.
    A parameter that is changed is checked with all others, as at the start; existing requests keep the old value.

    Attributes:
        n: number of outputs, which share the prompt's memory; at most 16384. Each needs one of the engine's
            max_num_seqs places and draws from its own random stream; output 0 is the same as with n = 1. If there are
            more outputs than places, they are generated in turns. At temperature 0 all are equal.
        temperature: 0 takes the most likely token; otherwise logits are divided by it; at most 1e30.
        top_k: keep the k most likely tokens (ties with the k-th are kept); 0 or -1 = all.
        top_p: keep the smallest set of most likely tokens whose probability reaches top_p; 1 = all.
        min_p: keep tokens at least min_p times as likely as the most likely; 0 = all.
        presence_penalty: number subtracted from the logits of tokens that are in the output; in [-2, 2].
        frequency_penalty: number subtracted from a token's logit for each time it is in the output; in [-2, 2].
        repetition_penalty: number by which the logits of tokens in the prompt or the output are divided if positive and
            multiplied if negative; in [0.001, 1000], 1 = none.
        logit_bias: numbers added to the logits of token ids, before the penalties; in [-100, 100].
        allowed_token_ids: the only tokens that can be drawn; None = all.
        bad_words: texts whose tokens, with and without a leading space, the output cannot hold; at most 1,024, and
            65,536 characters in all.
        max_tokens: most tokens to generate; None, or more than max_model_len leaves after the prompt, = as many as it
            leaves.
        min_tokens: end-of-sequence, unless ignore_eos makes it a token like others, and stop_token_ids cannot be drawn
            before this many tokens. A stop string that ends in the text of the first min_tokens tokens does not end the
            sequence: it stays in the text.
        seed: seed of the sequence's random stream; None, or -1 as in vLLM, = a seed from the engine's stream, different
            for each request.
        stop: text that ends the sequence; it is cut from the text. If several occur, the one that ends first counts,
            and of those that end together the first in the list. At most 64, and 4,096 characters in all.
        stop_token_ids: tokens that end the sequence; they stay in token_ids.
        include_stop_str_in_output: whether the stop string, or the text of the token that ended the sequence, stays in
            the text.
        ignore_eos: whether generation goes on after the model's end-of-sequence token.
        skip_special_tokens: whether special tokens are left out of the text.
        spaces_between_special_tokens: False leaves out the spaces that a tokenizer puts between two successive special
            tokens, or other tokens that were added to its vocabulary.
        logprobs: number of most likely tokens returned with each generated token and its log-probability; None = no
            log-probabilities, -1 = the whole vocabulary. The engine's max_logprobs limits it; the whole vocabulary
            needs max_logprobs=-1. Log-probabilities are the model's own: before temperature, truncation and edits.
        prompt_logprobs: `logprobs` for the prompt's tokens, all but the first. Such a prompt reads no cached prefix.
        truncate_prompt_tokens: number of last tokens of the prompt that are used; -1 = as many as leave room for
            max_tokens (or one token, if that is None) within max_model_len; None = a longer prompt is refused.
        structured_outputs: the shape that the text must have. The output ends when nothing can follow, even before
            min_tokens; with ignore_eos it does not end earlier. It also ends when allowed_token_ids, bad_words and
            min_tokens exclude all tokens that the shape allows: with finish_reason "stop" if the text has the shape,
            else with "abort" and a stop_reason that says so.
        thinking_token_budget: most tokens of the output's thoughts, without their marks; None, or -1 as in vLLM, = no
            limit. After that many the closing mark comes, whatever the model would have said, but never within a call.
            All thoughts of an output share them, and those of a thought that the prompt begins count.
        reasoning_end_str: the text that comes before that closing mark, as "I have to answer now."; or all that comes,
            with the mark in it, as in vLLM's setting of this name. It does not count to the budget, comes once in a
            thought, and is left out where a grammar forbids it. None = the mark alone.
        reasoning_parser: the format by which thinking_token_budget finds thoughts, of those of ``--reasoning-parser``;
            None = the one that the model's chat template renders.
        tool_parser: the format by which it finds calls, of those of ``--tool-parser``, or "none"; None as above.
        detokenize: whether text is made at all; False leaves it empty and allows no stop strings.
        output_kind: what `AsyncLLM.generate` yields. `LLM.generate` always returns the final output, and `LLM.stream`
            always yields deltas.
    """

    n: int = parameter(1, integers(1, MOST_OUTPUTS), "random stream")
    temperature: float = parameter(1.0, real(0.0, 1e30), "edit")
    top_k: int = parameter(0, integers(-1), "edit")
    top_p: float = parameter(1.0, real(0.0, 1.0, above=True), "edit")
    min_p: float = parameter(0.0, real(0.0, 1.0), "edit")
    presence_penalty: float = parameter(0.0, real(-2.0, 2.0), "edit")
    frequency_penalty: float = parameter(0.0, real(-2.0, 2.0), "edit")
    repetition_penalty: float = parameter(1.0, real(0.001, 1000.0), "edit")
    logit_bias: Mapping[int, float] | None = parameter(None, optional(_bias), "edit")
    allowed_token_ids: Sequence[int] | None = parameter(None, optional(_allowed), "edit")
    bad_words: Sequence[str] = parameter((), _bad_words, "edit")
    max_tokens: int | None = parameter(16, optional(integers(1)), "ends")
    min_tokens: int = parameter(0, integers(0), "edit")
    seed: int | None = parameter(None, _seed, "random stream")
    stop: str | Sequence[str] | None = parameter(None, _stops, "ends")
    stop_token_ids: Sequence[int] = parameter((), _tokens, "ends")
    ignore_eos: bool = parameter(False, switch, "ends")
    include_stop_str_in_output: bool = parameter(False, switch, "output")
    skip_special_tokens: bool = parameter(True, switch, "output")
    spaces_between_special_tokens: bool = parameter(True, switch, "output")
    detokenize: bool = parameter(True, switch, "output")
    logprobs: int | None = parameter(None, optional(integers(-1)), "output")
    prompt_logprobs: int | None = parameter(None, optional(integers(-1)), "output")
    truncate_prompt_tokens: int | None = parameter(None, optional(_cut), "ends")
    structured_outputs: StructuredOutputsParams | None = parameter(
        None, optional(instance(StructuredOutputsParams, "StructuredOutputsParams")), "edit"
    )
    thinking_token_budget: int | None = parameter(None, optional(_thought_budget), "edit")
    reasoning_end_str: str | None = parameter(None, optional(_text), "edit")
    reasoning_parser: str | None = parameter(None, optional(_text), "edit")
    tool_parser: str | None = parameter(None, optional(_text), "edit")
    output_kind: RequestOutputKind = parameter(
        RequestOutputKind.CUMULATIVE, instance(RequestOutputKind, "a RequestOutputKind"), "output"
    )

    def __new__(cls, **given: Any) -> Self:
        if not given:  # also where parameters are copied
            return super().__new__(cls)
        refuse_parameters("SamplingParams", given)
        for name in given.keys() - cls.__dataclass_fields__.keys():
            known = did_you_mean(name, cls.__dataclass_fields__)
            raise TypeError(f"{cls.__name__} got an unexpected keyword argument {shortened(name)!r}{known}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        values = self.__dict__
        for name, each in parameters_of(type(self)).items():
            values[name] = each.check(name, values[name])
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens={self.min_tokens} is above max_tokens={self.max_tokens}")
        for name in ("reasoning_end_str", "reasoning_parser", "tool_parser"):
            if values[name] is not None and self.thinking_token_budget is None:
                raise ValueError(f"{name}={shown(values[name])} needs thinking_token_budget, for which it is")
        if self.stop and not self.detokenize:
            raise ValueError(f"stop={shown(self.stop)} needs text, and detokenize=False makes none")

    def __setattr__(self, name: str, value: Any) -> None:
        if (
            next(reversed(self.__dataclass_fields__)) not in self.__dict__
        ):  # __init__ sets the parameters in their order
            self.__dict__[name] = value
        else:
            self.__dict__.update(vars(replace(self, **{name: value})))

    @classmethod
    def from_optional(cls, **given: Any) -> Self:
        """Return parameters in which None stands for the default, as vLLM's method of this name does.

        Tokens of `logit_bias` may be text, as in JSON.
        """
        if isinstance(bias := given.get("logit_bias"), Mapping):
            number = {token: int(token) for token in bias if isinstance(token, str) and token.isdecimal()}
            given["logit_bias"] = {number.get(token, token): value for token, value in bias.items()}
        return cls(**{name: value for name, value in given.items() if value is not None})

    def clone(self) -> SamplingParams:
        """Return a copy that shares nothing with this one."""
        return copy.deepcopy(self)

    @property
    def penalised(self) -> bool:
        """Tell whether any of the three penalties changes a logit."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Return `stop` as a tuple, however it was given."""
        return self.stop  # type: ignore[return-value]  # normalised in __post_init__


parameters_of(SamplingParams)


@with_vllms_attributes
@short_init
@dataclass(frozen=True)
class BeamSearchParams:
    """Controls one request's beam search; each parameter has the meaning that it has in transformers.

    Attributes:
        beam_width: number of beams, and of outputs. Each needs one of the engine's max_num_seqs places.
        max_tokens: most tokens of an output.
        length_penalty: power of an output's length by which its log-probability is divided to give its score; above 0
            favours long outputs; in [-50, 50].
        early_stopping: when the search ends. True: with the first beam_width finished outputs. False: when no running
            beam, if it ended now, would be better than the worst of them. "never": when no running beam could become
            better than that by max_tokens.
        ignore_eos: whether outputs go on after the model's end-of-sequence token.
        temperature: 0 only: beams are ranked by the model's own log-probabilities.
        include_stop_str_in_output: False only: beams end at end-of-sequence tokens, not at stop strings.

    Raises:
        ValueError: a value is out of its range; the message names it.
    """

    beam_width: int
    max_tokens: int
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    ignore_eos: bool = False
    temperature: float = 0.0
    include_stop_str_in_output: bool = False

    def __new__(cls, *_: Any, **given: Any) -> Self:
        refuse_parameters("BeamSearchParams", given)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if self.temperature != 0:
            raise ValueError(f"temperature={shown(self.temperature)} must be 0: beams are not drawn but ranked")
        if self.include_stop_str_in_output is not False:
            asked = f"include_stop_str_in_output={shown(self.include_stop_str_in_output)}"
            raise ValueError(f"{asked} must be False: beams have no stop strings")
        for name in ("beam_width", "max_tokens"):
            object.__setattr__(self, name, integer(name, whole(getattr(self, name)), low=1))
        penalty = number("length_penalty", self.length_penalty, low=-50.0, high=50.0)
        object.__setattr__(self, "length_penalty", penalty)
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise ValueError(f"early_stopping={shown(self.early_stopping)} is not True, False or 'never'")
        boolean("ignore_eos", self.ignore_eos)

    def sampling_params(self) -> SamplingParams:
        """Return the parameters of a request with `beam_width` greedy outputs, which a beam request shares."""
        return SamplingParams(
            n=self.beam_width, temperature=0.0, max_tokens=self.max_tokens, ignore_eos=self.ignore_eos
        )


if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = partial(name_in, __name__)
