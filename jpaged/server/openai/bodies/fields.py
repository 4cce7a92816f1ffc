"""The sampling parameters that OpenAI's bodies share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar

from pydantic import Field, model_validator

from jpaged import BeamSearchParams, RequestOutputKind, SamplingParams, StructuredOutputsParams
from jpaged.server.bodies import Body, FieldClasses, at_most, only_fields
from jpaged.server.errors import ApiError, refused
from jpaged.server.openai.bodies.field_classes import SAMPLING, STREAM_OPTIONS

MOST_CHOICES = 128
"""Limit on the outputs of one prompt, as in OpenAI's API."""
MOST_BIASES = 1024
"""Limit on the tokens of `logit_bias`: the sizes of more are compiled while all requests wait."""
MOST_TEXTS = 1024
"""Limit on the texts of `bad_words`, each of which is looked for after every token; `SamplingParams` takes fewer of
`stop`."""
MOST_TOKEN_IDS = 2**18
"""Limit on the tokens of `allowed_token_ids` and `stop_token_ids`, as many as the largest vocabularies have."""
_SAME_NAME = (
    "frequency_penalty",
    "presence_penalty",
    "max_tokens",
    "n",
    "stop",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "stop_token_ids",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "truncate_prompt_tokens",
    "allowed_token_ids",
    "bad_words",
    "prompt_logprobs",
    "thinking_token_budget",
)
_BEAM = {"n", "max_tokens", "length_penalty", "early_stopping", "ignore_eos", "temperature"}
"""Fields that a beam search uses."""
_MAY_BE_FALSE = {"stream", "logprobs", "include_stop_str_in_output"}
"""Fields whose value false a beam search accepts."""


class StreamOptions(Body):
    """Options of a stream.

    Attributes:
        include_usage: whether a last chunk has the usage.
        continuous_usage_stats: whether every chunk has it (vLLM's).
    """

    classes: ClassVar[FieldClasses] = STREAM_OPTIONS

    include_usage: bool = False
    continuous_usage_stats: bool = False


class JsonSchema(Body):
    """A schema and its name. The description has no effect, since the model does not see the schema."""

    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """The shape of an answer: "text", "json_object" or "json_schema".

    Attributes:
        schema_: the schema of a "json_object", as llama.cpp and others have it.
    """

    type: str
    json_schema: JsonSchema | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")

    @model_validator(mode="after")
    def _has_what_its_type_says(self) -> ResponseFormat:
        allowed = {"text": {"type"}, "json_object": {"type", "schema_"}, "json_schema": {"type", "json_schema"}}
        if self.type in allowed:
            only_fields(self, allowed[self.type], "response_format", f"a format of the type {self.type!r}")
        return self

    def shape(self) -> StructuredOutputsParams | None:
        """Return the engine's form of the shape.

        Raises:
            ApiError: the type is unknown, or its schema is missing.
        """
        if self.type == "text":
            return None
        if self.type == "json_object" and self.schema_ is None:
            return StructuredOutputsParams(json_object=True)
        if self.type == "json_object":
            return StructuredOutputsParams(json=self.schema_)
        if self.type != "json_schema":
            message = f"response_format.type={self.type!r} is not one of text, json_object, json_schema"
            raise ApiError(message, param="response_format.type", code="invalid_value")
        if self.json_schema is None or not isinstance(self.json_schema.schema_, dict):
            schema = None if self.json_schema is None else self.json_schema.schema_
            raise ApiError(
                f"response_format.json_schema.schema={schema!r} must be a JSON schema",
                param="response_format.json_schema",
                code="invalid_value",
            )
        return StructuredOutputsParams(json=self.json_schema.schema_)


class Structure(Body):
    """The shape of a text; see `jpaged.StructuredOutputsParams`."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool = False
    disable_any_whitespace: bool = False

    def shape(self) -> StructuredOutputsParams:
        """Return the engine's form of the shape."""
        return StructuredOutputsParams(**self.model_dump(exclude_unset=True, by_alias=True))


class SamplingFields(Body):
    """Fields of all generating requests, with the meaning of `jpaged.SamplingParams`. Those that OpenAI lacks are
    vLLM's."""

    classes: ClassVar[FieldClasses] = SAMPLING

    model: str | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], at_most(MOST_BIASES)] | None = None
    max_tokens: int | None = None
    n: int = Field(1, ge=1, le=MOST_CHOICES)
    seed: int | None = None
    stop: Annotated[str | list[str] | None, at_most(MOST_TEXTS)] = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    user: str | None = Field(None, max_length=256)
    response_format: ResponseFormat | None = None
    # vLLM's
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[int] | None, at_most(MOST_TOKEN_IDS)] = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    allowed_token_ids: Annotated[list[int] | None, at_most(MOST_TOKEN_IDS)] = None
    bad_words: Annotated[list[str] | None, at_most(MOST_TEXTS)] = None
    prompt_logprobs: int | None = None
    thinking_token_budget: int | None = None
    priority: int | None = None
    cache_salt: str | None = Field(None, min_length=1)
    structured_outputs: Structure | None = None
    use_beam_search: bool = False
    length_penalty: float | None = None
    early_stopping: bool | None = None
    return_token_ids: bool = False

    @property
    def sent_as(self) -> Mapping[str, str]:
        """Return the client's names, or paths, of the parameters that have others in `SamplingParams`."""
        names = {"beam_width": "n"}
        if self.structured_outputs is not None:
            return names | {kind: f"structured_outputs.{kind}" for kind in ("json", "regex", "choice", "grammar")}
        if self.response_format is None:
            return names
        path = "response_format.json_schema.schema" if self.response_format.json_schema else "response_format.schema"
        return names | {"json": path, "grammar": path}  # a grammar is what a schema becomes after a thought

    def refusal(self, error: Exception) -> ApiError:
        """Return the error for a value that jpaged refuses, by the names that the client sent."""
        return refused(error, type(self).model_fields, self.sent_as)

    def sampling_params(self, defaults: SamplingParams, **extra: Any) -> SamplingParams:
        """Return the engine's parameters.

        Args:
            defaults: values of fields that the request lacks.
            extra: values that override both.

        Raises:
            ApiError: a value is refused; the error names the field.
        """
        self._check()
        given: dict[str, Any] = {name: getattr(self, name) for name in _SAME_NAME if name in self.model_fields_set}
        if given.get("top_p") == 0:  # the most likely token alone
            given |= {"top_p": 1.0, "temperature": 0.0}
        if self.seed is not None:
            given["seed"] = self.seed % 2**63  # OpenAI's may be negative
        if self.logit_bias is not None:
            given["logit_bias"] = {_token(text): bias for text, bias in self.logit_bias.items()}
        given["output_kind"] = RequestOutputKind.DELTA if self.stream else RequestOutputKind.FINAL_ONLY
        try:
            if "structured_outputs" not in extra and (shape := self.shape()) is not None:
                given["structured_outputs"] = shape
            return replace(defaults, **(given | extra))
        except (ValueError, TypeError) as error:
            raise self.refusal(error) from error

    def beam_params(self, most_tokens: int) -> BeamSearchParams:
        """Return the parameters of a beam search of `n` beams.

        Args:
            most_tokens: tokens of an output if the request sets no limit.

        Raises:
            ApiError: a field has no meaning in a beam search, or a value is refused.
        """
        self._check()
        useless = {*_SAME_NAME, "seed", "logit_bias", "stream", "structured_outputs", "response_format", "logprobs"}
        for name in sorted((useless - _BEAM) & self.model_fields_set):
            if name not in _MAY_BE_FALSE or getattr(self, name) is not False:
                raise ApiError(f"{name} has no meaning with use_beam_search=true", param=name, code="invalid_value")
        given = {name: getattr(self, name) for name in _BEAM & self.model_fields_set}
        given |= {"beam_width": given.pop("n", 1), "max_tokens": given.get("max_tokens", most_tokens)}
        try:
            return BeamSearchParams(**given)
        except ValueError as error:
            raise self.refusal(error) from error

    def _check(self) -> None:
        """Refuse fields that need another one, or exclude each other."""
        if self.structured_outputs is not None and self._has_format:
            message = "structured_outputs and response_format are two shapes for one text: give one of them"
            raise ApiError(message, code="invalid_value")
        if self.stream_options is not None and not self.stream:
            raise ApiError("stream_options needs stream=true", param="stream_options", code="invalid_value")
        if not self.use_beam_search:
            for name in {"length_penalty", "early_stopping"} & self.model_fields_set:
                raise ApiError(f"{name} needs use_beam_search=true", param=name, code="invalid_value")
        options = self.stream_options
        if options is not None and options.continuous_usage_stats and not options.include_usage:
            raise ApiError(
                "stream_options.continuous_usage_stats needs include_usage=true",
                param="stream_options.continuous_usage_stats",
                code="invalid_value",
            )

    @property
    def has_shape(self) -> bool:
        """Tell whether the text has a shape."""
        return self.structured_outputs is not None or self._has_format

    @property
    def _has_format(self) -> bool:
        return self.response_format is not None and self.response_format.type != "text"

    def shape(self) -> StructuredOutputsParams | None:
        """Return the shape that the request asks of the answer's text; None if it asks for none.

        Raises:
            ApiError, ValueError, TypeError: the shape is invalid.
        """
        if self.structured_outputs is not None:
            return self.structured_outputs.shape()
        return None if self.response_format is None else self.response_format.shape()


def _token(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 20):
        message = f"logit_bias has the key {text[:40]!r}, which is not a token id"
        raise ApiError(message, param="logit_bias", code="invalid_value")
    return int(text)
