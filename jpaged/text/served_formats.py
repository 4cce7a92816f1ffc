"""Chooses the answer formats of a model for all who read its answers: servers, replicas and `LLM.chat`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jpaged.answers.response_template import RESPONSE_TEMPLATE, format_of_template
from jpaged.answers.rows import NO_FORMAT, given_format, thought_formats, tool_formats
from jpaged.reasoning_config import ReasoningConfig
from jpaged.text.answer_choice import Choice, chosen_formats
from jpaged.text.thought_budget import ThoughtForms
from jpaged.validation import one_of


def served_formats(
    tokenizer: Any,
    config: ReasoningConfig | None,
    vocab_size: int,
    tool_parser: str | None = None,
    reasoning_parser: str | None = None,
) -> Choice:
    """Return the formats that are named, and the ones that the chat template is found to render for those that are not.

    Args:
        tokenizer: a transformers tokenizer; None where the model has none.
        config: names the format of thoughts, too, and says how they end; None = nothing does.
        vocab_size: number of the model's logits.
        tool_parser, reasoning_parser: names of rows of `jpaged.answers.rows`; ``none`` = none; None = one is found.

    Raises:
        ValueError: a name is unknown, or is that of the model's response template, which is missing or has what no
            format has; or no thought of the model could end as the config says.
    """
    reasoning_parser = reasoning_parser or (config and config.reasoning_parser) or None
    if RESPONSE_TEMPLATE in (tool_parser, reasoning_parser):
        format_of_template(getattr(tokenizer, "response_template", None))  # says why, if the model has none
    both = tool_parser is not None and reasoning_parser is not None
    choice = Choice() if both else chosen_formats(tokenizer)
    if tool_parser is not None:
        choice = replace(choice, tools=_named("tool_parser", tool_parser, tool_formats()), why_no_tools="")
    if reasoning_parser is not None:
        choice = replace(
            choice, thoughts=_named("reasoning_parser", reasoning_parser, thought_formats()), why_no_thoughts=""
        )
    if config is not None:
        _check(config, choice, tokenizer, vocab_size)
    return choice


def _named(parameter: str, row: str, known: tuple[str, ...]) -> str | None:
    one_of(parameter, row, (NO_FORMAT, *known))
    return given_format(row)


def _check(config: ReasoningConfig, choice: Choice, tokenizer: Any, vocab_size: int) -> None:
    if choice.thoughts is None:
        raise ValueError(
            f"reasoning_config={config} needs the form of the model's thoughts, and none is known: its "
            "reasoning_parser or --reasoning-parser names one"
        )
    formats = choice.thoughts, choice.tools or NO_FORMAT
    ThoughtForms(tokenizer, config.reasoning_start_str).check_text(config.reasoning_end_str, *formats, vocab_size)
