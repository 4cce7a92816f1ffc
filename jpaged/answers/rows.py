"""The table of answer formats: one row a model family. A row's name is a value of ``--tool-parser`` and, if the family
has thoughts, of ``--reasoning-parser``."""

from __future__ import annotations

from jpaged.answers.format import AnswerFormat, Calls, Region

THINK = Region(("<think>",), ("</think>",))
_HERMES = Calls("<tool_call>", opening="\n", between="\n</tool_call>\n<tool_call>\n", closing="\n</tool_call>")

ANSWER_FORMATS: dict[str, AnswerFormat] = {
    "think": AnswerFormat(THINK),
    "hermes": AnswerFormat(THINK, calls=(_HERMES,)),
    "llama3": AnswerFormat(
        calls=(
            Calls(
                "",
                '{"name": "$name", "parameters": $arguments}',
                between="; ",
                before=("<|python_tag|>",),
            ),
        )
    ),
    "mistral": AnswerFormat(
        Region(("[THINK]",), ("[/THINK]",)),
        calls=(
            Calls(
                "[TOOL_CALLS]",
                '{"name": "$name", "arguments": $arguments«, "id": "$id"»}',
                opening="[",
                between=", ",
                closing="]",
            ),
        ),
    ),
    "mistral_args": AnswerFormat(
        Region(("[THINK]",), ("[/THINK]",)),
        calls=(Calls("[TOOL_CALLS]", "$name«[CALL_ID]$id»[ARGS]$arguments", between="[TOOL_CALLS]"),),
        variant_of="mistral",
        variant_token="[ARGS]",
    ),
}


def tool_formats() -> tuple[str, ...]:
    """Return the values of ``--tool-parser``."""
    return tuple(name for name, form in ANSWER_FORMATS.items() if form.calls and not form.variant_of)


def thought_formats() -> tuple[str, ...]:
    """Return the values of ``--reasoning-parser``."""
    return tuple(name for name, form in ANSWER_FORMATS.items() if form.thought and not form.variant_of)
