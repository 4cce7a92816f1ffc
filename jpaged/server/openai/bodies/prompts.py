"""The bodies of `/v1/completions`, `/tokenize` and `/detokenize`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field

from jpaged.server.bodies import Body, FieldClasses
from jpaged.server.openai.bodies import field_classes
from jpaged.server.openai.bodies.chat import Message, Tool
from jpaged.server.openai.bodies.fields import SamplingFields

MOST_PROMPTS = 2**14
"""Limit on the prompts of one body before they are read; `ServerSettings.max_waiting` is usually lower."""
Prompts = str | list[int] | list[str | list[int]]


def few_prompts(value: Any) -> Any:
    """Check the number of prompts first; a single prompt of tokens is a list too, and cheap to look at."""
    if isinstance(value, list) and len(value) > MOST_PROMPTS and type(value[0]) not in (int, float):
        raise ValueError(f"it has {len(value)} prompts, the limit is {MOST_PROMPTS}")
    return value


def each_prompt(given: Prompts) -> list[str | list[int]]:
    """Return the prompts as a list, also a single one of text or of tokens."""
    if isinstance(given, str):
        return [given]
    if given and isinstance(given[0], int):
        return [given]
    return given  # type: ignore[return-value]


class CompletionRequest(SamplingFields):
    """A request to continue one or several prompts, given as text or tokens.

    Attributes:
        echo: whether outputs begin with the prompt; with `logprobs` its tokens are scored too, and with
            ``max_tokens=0`` nothing is generated.
        logprobs: number of most likely tokens at each position, -1 = the whole vocabulary (vLLM's).
        best_of: number of generated outputs, of which the `n` with the best mean log-probability are returned.
        add_special_tokens: whether the tokenizer adds its initial special tokens (vLLM's).
    """

    classes: ClassVar[FieldClasses] = field_classes.COMPLETION

    @classmethod
    def _prepared(cls, data: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in data.items() if name != "suffix" or value != ""}

    prompt: Annotated[Prompts, BeforeValidator(few_prompts)]
    best_of: int | None = Field(None, ge=1, le=128)
    echo: bool = False
    logprobs: int | None = Field(None, ge=-1)
    max_tokens: int | None = Field(16, ge=0)
    add_special_tokens: bool = True

    @property
    def sent_as(self) -> Mapping[str, str]:
        """Return the client's names of the parameters that have others in the engine."""
        scored = {"prompt_logprobs": "logprobs"} if self.prompt_logprobs is None else {}
        return {**super().sent_as, **scored, "prompt_token_ids": "prompt"}

    @property
    def prompts(self) -> list[str | list[int]]:
        """Return the prompts as a list, also a single one."""
        return each_prompt(self.prompt)


class TokenizeRequest(Body):
    """A request for the tokens of a text or of a conversation."""

    classes: ClassVar[FieldClasses] = field_classes.TOKENIZE

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = Field(None, min_length=1)
    add_special_tokens: bool | None = None
    return_token_strs: bool = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None


class DetokenizeRequest(Body):
    """A request for the text of tokens."""

    model: str | None = None
    tokens: list[int]
