"""The table of answer formats: one row a model family.

A row's name is a value of ``--tool-parser`` if the family has calls, and of ``--reasoning-parser`` if it has thoughts.
"""

# ruff: noqa: RUF001 - DeepSeek's marks have fullwidth bars

from __future__ import annotations

from jpaged.answers.format import JSON_CALL, AnswerFormat, Calls, Region
from jpaged.answers.notations import Json, Literals, Tagged
from jpaged.answers.response_template import RESPONSE_TEMPLATE

THINK = Region(("<think>",), ("</think>",))
_PYTHON = Literals(keywords=True)
_ARG_KEYS = "<arg_key>$key</arg_key>\n<arg_value>$value</arg_value>\n"
_PARAMETER_CALL = '{"name": "$name", "parameters": $arguments}'


def _in_tags(begin: str, end: str, call: str = JSON_CALL, notation: Tagged | None = None) -> Calls:
    """Return calls that are each between two tags, in lines of their own."""
    return Calls(begin, call, "\n", f"\n{end}\n{begin}\n", f"\n{end}", notation or Json())


def _listed(begin: str, end: str = "", call: str = JSON_CALL, *, is_read_only: bool = False) -> Calls:
    """Return calls that are a list of JSON objects between two marks."""
    return Calls(begin, call, opening="[", between=", ", closing=f"]{end}", is_read_only=is_read_only)


def _own_quotes(quote: str) -> Literals:
    """Return the notation of JSON with bare keys, and with a mark of its own around strings."""
    words = ("true", "false", "null")
    return Literals(bare_keys=True, quotes=((quote, quote),), escapes=False, words=words, comma=",", colon=":")


_HERMES = _in_tags("<tool_call>", "</tool_call>")
_QWEN3_CODER = _in_tags(
    "<tool_call>",
    "</tool_call>",
    "<function=$name>\n$arguments</function>",
    Tagged("<parameter=$key>\n$value\n</parameter>\n"),
)
_CHANNEL = "<|channel|>commentary to=functions."

ANSWER_FORMATS: dict[str, AnswerFormat] = {
    "think": AnswerFormat(THINK),
    "hermes": AnswerFormat(THINK, calls=(_HERMES,)),
    "qwen3_coder": AnswerFormat(THINK, calls=(_QWEN3_CODER,)),
    "llama3": AnswerFormat(
        calls=(Calls("", _PARAMETER_CALL, between="; ", before=("<|python_tag|>",)),),
    ),
    "pythonic": AnswerFormat(
        calls=(Calls("", "$name($arguments)", "[", ", ", "]", notation=_PYTHON, before=("<|python_tag|>",)),),
    ),
    "llama4": AnswerFormat(
        calls=(
            Calls("", _PARAMETER_CALL, between="; ", closing="<|python_end|>", before=("<|python_start|>",)),
            Calls("", "$name($arguments)", "[", ", ", "]", notation=_PYTHON, before=("<|python_start|>",)),
        ),
        skipped=("<|python_end|>",),
        ends=("<|python_end|>",),
    ),
    "mistral": AnswerFormat(
        Region(("[THINK]",), ("[/THINK]",)),
        calls=(_listed("[TOOL_CALLS]", call='{"name": "$name", "arguments": $arguments«, "id": "$id"»}'),),
    ),
    "mistral_args": AnswerFormat(
        Region(("[THINK]",), ("[/THINK]",)),
        calls=(Calls("[TOOL_CALLS]", "$name«[CALL_ID]$id»[ARGS]$arguments", between="[TOOL_CALLS]"),),
        variant_of="mistral",
        variant_token="[ARGS]",
    ),
    "gpt_oss": AnswerFormat(
        Region(("<|channel|>analysis<|message|>",), ("<|end|>",), anywhere=True),
        Region(
            ("<|channel|>final<|message|>", "<|channel|>commentary<|message|>"),
            ("<|end|>", "<|return|>"),
            anywhere=True,
        ),
        calls=(
            Calls(
                _CHANNEL,
                "$name« <|constrain|>json»<|message|>$arguments",
                between=f"<|call|><|start|>assistant{_CHANNEL}",
                closing="<|call|>",
            ),
            Calls(
                " to=functions.",
                "$name<|channel|>commentary« <|constrain|>json»« json»<|message|>$arguments",
                between="<|call|><|start|>assistant to=functions.",
                closing="<|call|>",
            ),
        ),
        skipped=("<|start|>assistant",),
        ends=("<|call|>", "<|return|>"),
    ),
    "gemma4": AnswerFormat(
        Region(("<|channel>thought\n",), ("<channel|>",)),
        calls=(
            Calls(
                "<|tool_call>",
                "call:$name$arguments",
                between="<tool_call|><|tool_call>",
                closing="<tool_call|>",
                notation=_own_quotes('<|"|>'),
            ),
        ),
        ends=("<|tool_response>", "<turn|>"),
    ),
    "functiongemma": AnswerFormat(
        calls=(
            Calls(
                "<start_function_call>",
                "call:$name$arguments",
                between="<end_function_call><start_function_call>",
                closing="<end_function_call>",
                notation=_own_quotes("<escape>"),
            ),
        ),
        ends=("<start_function_response>",),
    ),
    "glm45": AnswerFormat(
        THINK,
        calls=(
            Calls(
                "<tool_call>",
                "$name\n$arguments</tool_call>",
                between="\n<tool_call>",
                notation=Tagged(_ARG_KEYS),
            ),
        ),
    ),
    "glm47": AnswerFormat(
        THINK,
        calls=(
            Calls(
                "<tool_call>",
                "$name$arguments</tool_call>",
                between="<tool_call>",
                notation=Tagged(_ARG_KEYS.replace("\n", "")),
            ),
        ),
    ),
    "deepseek_v3": AnswerFormat(
        THINK,
        calls=(
            Calls(
                "<｜tool▁calls▁begin｜>",
                "<｜tool▁call▁begin｜>function<｜tool▁sep｜>$name\n```json\n$arguments\n```<｜tool▁call▁end｜>",
                between="\n",
                closing="<｜tool▁calls▁end｜>",
            ),
        ),
    ),
    "deepseek_v31": AnswerFormat(
        THINK,
        calls=(
            Calls(
                "<｜tool▁calls▁begin｜>",
                "<｜tool▁call▁begin｜>$name<｜tool▁sep｜>$arguments<｜tool▁call▁end｜>",
                closing="<｜tool▁calls▁end｜>",
            ),
        ),
    ),
    "deepseek_v32": AnswerFormat(
        THINK,
        calls=(
            Calls(
                "<｜DSML｜function_calls>",
                '<｜DSML｜invoke name="$name">\n$arguments</｜DSML｜invoke>',
                opening="\n",
                between="\n",
                closing="\n</｜DSML｜function_calls>",
                notation=Tagged('<｜DSML｜parameter name="$key" string="$string">$value</｜DSML｜parameter>\n'),
            ),
        ),
    ),
    "kimi_k2": AnswerFormat(
        THINK,
        calls=(
            Calls(
                "<|tool_calls_section_begin|>",
                "<|tool_call_begin|>functions.$name:$id<|tool_call_argument_begin|>$arguments<|tool_call_end|>",
                closing="<|tool_calls_section_end|>",
            ),
        ),
    ),
    "granite3": AnswerFormat(
        Region(("<think>", "Here is my thought process:"), ("</think>", "Here is my response:")),
        Region(("<response>",), ("</response>",)),
        calls=(_listed("<|tool_call|>"),),
    ),
    "olmo3": AnswerFormat(
        THINK,
        calls=(
            Calls(
                "<function_calls>",
                "$name($arguments)",
                between="\n",
                closing="</function_calls>",
                notation=_PYTHON,
            ),
        ),
    ),
    "lfm2": AnswerFormat(
        THINK,
        calls=(
            Calls(
                "<|tool_call_start|>",
                "$name($arguments)",
                opening="[",
                between=", ",
                closing="]<|tool_call_end|>",
                notation=_PYTHON,
            ),
            _listed("<|tool_call_start|>", "<|tool_call_end|>", is_read_only=True),
        ),
    ),
    "minimax_m2": AnswerFormat(
        THINK,
        calls=(
            Calls(
                "<minimax:tool_call>",
                '<invoke name="$name">\n$arguments</invoke>',
                opening="\n",
                between="\n",
                closing="\n</minimax:tool_call>",
                notation=Tagged('<parameter name="$key">$value</parameter>\n'),
            ),
        ),
    ),
    "seed_oss": AnswerFormat(
        Region(("<seed:think>",), ("</seed:think>",)),
        calls=(
            _in_tags(
                "<seed:tool_call>",
                "</seed:tool_call>",
                "<function=$name>\n$arguments</function>",
                Tagged("<parameter=$key>$value</parameter>\n"),
            ),
        ),
    ),
    "ernie45": AnswerFormat(THINK, Region(("<response>\n",), ("\n</response>",)), calls=(_HERMES,)),
    "hunyuan": AnswerFormat(
        THINK,
        Region(("<answer>\n",), ("\n</answer>",)),
        calls=(_listed("<tool_calls>", "</tool_calls>"),),
    ),
    "hunyuan_v3": AnswerFormat(
        THINK,
        calls=(
            Calls(
                "<tool_calls>",
                "<tool_call>$name<tool_sep>\n$arguments</tool_call>",
                opening="\n",
                between="\n",
                closing="\n</tool_calls>",
                notation=Tagged(_ARG_KEYS),
            ),
        ),
    ),
    "nemotron": AnswerFormat(THINK, calls=(_listed("<TOOLCALL>", "</TOOLCALL>"),)),
    "phi4": AnswerFormat(
        THINK, calls=(_listed("<|tool_call|>", "<|/tool_call|>"), _listed("functools", is_read_only=True))
    ),
    "apertus": AnswerFormat(
        Region(("<|inner_prefix|>",), ("<|inner_suffix|>",), anywhere=True),
        calls=(_listed("<|tools_prefix|>", "<|tools_suffix|>", '{"$name": $arguments}'),),
    ),
    "cohere": AnswerFormat(
        Region(("<|START_THINKING|>",), ("<|END_THINKING|>",)),
        Region(("<|START_RESPONSE|>",), ("<|END_RESPONSE|>",)),
        calls=(
            Calls(
                "<|START_ACTION|>",
                '{"tool_call_id": "$id", "tool_name": "$name", "parameters": $arguments}',
                opening="[\n    ",
                between=",\n    ",
                closing="\n]<|END_ACTION|>",
            ),
        ),
    ),
    "xlam": AnswerFormat(THINK, calls=(_listed(""),)),
    "json": AnswerFormat(THINK, calls=(Calls(""), _listed(""))),
}
"""Rows by name. The first row that reads what a model's template renders is the model's, so a general one comes after
those that know more marks."""

_SAME = {
    "qwen": "hermes",
    "granite4": "hermes",
    "smollm3": "hermes",
    "qwen3_5": "qwen3_coder",
    "nemotron3": "qwen3_coder",
}
"""Further names of rows, of families with the same format."""
ANSWER_FORMATS |= {name: ANSWER_FORMATS[row] for name, row in _SAME.items()}


NO_FORMAT = "none"
"""The value of ``--tool-parser`` and ``--reasoning-parser`` that names no row, where none is to be found either."""


def given_format(name: str | None) -> str | None:
    """Return the row that ``--tool-parser`` or ``--reasoning-parser`` names; None: none, or one is to be found."""
    return None if name == NO_FORMAT else name


def tool_formats() -> tuple[str, ...]:
    """Return the values of ``--tool-parser``."""
    rows = (name for name, form in ANSWER_FORMATS.items() if form.calls and not form.variant_of)
    return (*rows, RESPONSE_TEMPLATE)


def thought_formats() -> tuple[str, ...]:
    """Return the values of ``--reasoning-parser``."""
    rows = (name for name, form in ANSWER_FORMATS.items() if form.thought and not form.variant_of)
    return (*rows, RESPONSE_TEMPLATE)
