"""Chat templates for tests, one a row of answer formats, written from what the families' formats are.

Each renders a conversation's last message: its thought, its text, its calls.
"""

# ruff: noqa: RUF001 - DeepSeek's marks have fullwidth bars

import json

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from jpaged.answers.rows import ANSWER_FORMATS
from jpaged.text.template_rendering import render

_BEGIN = "{% set m = messages[-1] %}{% set calls = m.tool_calls or [] %}"
_THINK = _BEGIN + "{% if m.thinking %}<think>\n{{ m.thinking }}\n</think>\n\n{% endif %}{{ m.content or '' }}"
_EACH = "{% for c in calls %}{% set f = c.function %}"
_ARG = "{% for k, v in f.arguments.items() %}"
_RAW = "{{ v if v is string else v | tojson }}"
_JSON = "{{ {'name': f.name, 'arguments': f.arguments} | tojson }}"
_LIST = _EACH + "{{ ', ' if not loop.first }}" + _JSON + "{% endfor %}"
_PY = (
    "{% macro py(v) %}{% if v is string %}{{ v | tojson }}{% elif v is boolean %}{{ 'True' if v else 'False' }}"
    "{% elif v is none %}None{% elif v is mapping %}{{ '{' }}{% for k, w in v.items() %}"
    "{{ ', ' if not loop.first }}{{ k | tojson }}: {{ py(w) }}{% endfor %}{{ '}' }}{% elif v is sequence %}["
    "{% for w in v %}{{ ', ' if not loop.first }}{{ py(w) }}{% endfor %}]{% else %}{{ v }}{% endif %}{% endmacro %}"
)
_KEYWORDS = "{{ f.name }}(" + _ARG + "{{ ', ' if not loop.first }}{{ k }}={{ py(v) }}{% endfor %})"
_OWN = (
    "{% macro own(v, q) %}{% if v is string %}{{ q }}{{ v }}{{ q }}{% elif v is mapping %}{{ '{' }}"
    "{% for k, w in v.items() %}{{ ',' if not loop.first }}{{ k }}:{{ own(w, q) }}{% endfor %}{{ '}' }}"
    "{% elif v is sequence %}[{% for w in v %}{{ ',' if not loop.first }}{{ own(w, q) }}{% endfor %}]"
    "{% else %}{{ v | tojson }}{% endif %}{% endmacro %}"
)


def _tagged(begin, end):
    return _ARG + begin + _RAW + end + "{% endfor %}"


def _hermes(thinks=_THINK):
    return thinks + _EACH + "\n<tool_call>\n" + _JSON + "\n</tool_call>{% endfor %}"


def _if_calls(begin, each, end):
    return "{% if calls %}" + begin + each + end + "{% endif %}"


def _wrapped(begin, end):
    thinks = "{% if m.thinking %}<think>\n{{ m.thinking }}\n</think>\n{% endif %}"
    return _BEGIN + thinks + "{% if m.content %}" + begin + "{{ m.content }}" + end + "{% endif %}"


_QWEN = (
    _EACH
    + "\n<tool_call>\n<function={{ f.name }}>\n"
    + _tagged("<parameter={{ k }}>\n", "\n</parameter>\n")
    + "</function>\n</tool_call>{% endfor %}"
)
_PARAMETERS = (
    _EACH + "{{ '; ' if not loop.first }}{{ {'name': f.name, 'parameters': f.arguments} | tojson }}{% endfor %}"
)
_TEXT = _BEGIN + "{{ m.content or '' }}"
_MISTRAL = _BEGIN + "{% if m.thinking %}[THINK]{{ m.thinking }}[/THINK]{% endif %}{{ m.content or '' }}"
_GLM = "<arg_key>{{ k }}</arg_key>\n<arg_value>"
TEMPLATES = {
    "think": _THINK,
    "hermes": _hermes(),
    "qwen3_coder": _THINK + _QWEN,
    "llama3": _TEXT + _PARAMETERS,
    "pythonic": _PY + _TEXT + _if_calls("[", _EACH + "{{ ', ' if not loop.first }}" + _KEYWORDS + "{% endfor %}", "]"),
    "llama4": _TEXT + _if_calls("<|python_start|>", _PARAMETERS, "<|python_end|>"),
    "mistral": _MISTRAL
    + _if_calls(
        "[TOOL_CALLS][",
        _EACH
        + "{{ ', ' if not loop.first }}"
        + "{{ {'name': f.name, 'arguments': f.arguments, 'id': 'abcdefg0' ~ loop.index} | tojson }}{% endfor %}",
        "]",
    ),
    "mistral_args": _MISTRAL + _EACH + "[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}{% endfor %}",
    "gpt_oss": _BEGIN
    + "{% if m.thinking %}<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    + "{% if m.content %}{% if m.thinking %}<|start|>assistant{% endif %}"
    + "<|channel|>{{ 'commentary' if calls else 'final' }}<|message|>{{ m.content }}<|end|>{% endif %}"
    + _EACH
    + "{% if m.thinking or m.content or not loop.first %}<|start|>assistant{% endif %}"
    + " to=functions.{{ f.name }}<|channel|>commentary json<|message|>{{ f.arguments | tojson }}<|call|>{% endfor %}",
    "gemma4": _OWN
    + _BEGIN
    + "{% if m.thinking %}<|channel>thought\n{{ m.thinking }}<channel|>{% endif %}{{ m.content or '' }}"
    + _EACH
    + "<|tool_call>call:{{ f.name }}{{ own(f.arguments, '<|\"|>') }}<tool_call|>{% endfor %}",
    "functiongemma": _OWN
    + _TEXT
    + _EACH
    + "<start_function_call>call:{{ f.name }}{{ own(f.arguments, '<escape>') }}<end_function_call>{% endfor %}",
    "glm45": _THINK
    + _EACH
    + "\n<tool_call>{{ f.name }}\n"
    + _tagged(_GLM, "</arg_value>\n")
    + "</tool_call>{% endfor %}",
    "glm47": _THINK
    + _EACH
    + "<tool_call>{{ f.name }}"
    + _tagged(_GLM.replace("\n", ""), "</arg_value>")
    + "</tool_call>{% endfor %}",
    "deepseek_v3": _THINK
    + _if_calls(
        "<｜tool▁calls▁begin｜>",
        _EACH
        + "{{ '\n' if not loop.first }}<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ f.name }}\n```json\n"
        + "{{ f.arguments | tojson }}\n```<｜tool▁call▁end｜>{% endfor %}",
        "<｜tool▁calls▁end｜>",
    ),
    "deepseek_v31": _THINK
    + _if_calls(
        "<｜tool▁calls▁begin｜>",
        _EACH
        + "<｜tool▁call▁begin｜>{{ f.name }}<｜tool▁sep｜>{{ f.arguments | tojson }}<｜tool▁call▁end｜>{% endfor %}",
        "<｜tool▁calls▁end｜>",
    ),
    "deepseek_v32": _THINK
    + _if_calls(
        "\n\n<｜DSML｜function_calls>\n",
        _EACH
        + '<｜DSML｜invoke name="{{ f.name }}">\n'
        + _tagged(
            "<｜DSML｜parameter name=\"{{ k }}\" string=\"{{ 'true' if v is string else 'false' }}\">",
            "</｜DSML｜parameter>\n",
        )
        + "</｜DSML｜invoke>\n{% endfor %}",
        "</｜DSML｜function_calls>",
    ),
    "kimi_k2": _THINK
    + _if_calls(
        "<|tool_calls_section_begin|>",
        _EACH
        + "<|tool_call_begin|>functions.{{ f.name }}:{{ loop.index0 }}<|tool_call_argument_begin|>"
        + "{{ f.arguments | tojson }}<|tool_call_end|>{% endfor %}",
        "<|tool_calls_section_end|>",
    ),
    "granite3": _wrapped("<response>", "</response>") + _if_calls("<|tool_call|>[", _LIST, "]"),
    "olmo3": _PY
    + _THINK
    + _if_calls(
        "<function_calls>",
        _EACH + "{{ '\n' if not loop.first }}" + _KEYWORDS + "{% endfor %}",
        "</function_calls>",
    ),
    "lfm2": _PY
    + _THINK
    + _if_calls(
        "<|tool_call_start|>[",
        _EACH + "{{ ', ' if not loop.first }}" + _KEYWORDS + "{% endfor %}",
        "]<|tool_call_end|>",
    ),
    "minimax_m2": _THINK
    + _if_calls(
        "\n<minimax:tool_call>\n",
        _EACH
        + '<invoke name="{{ f.name }}">\n'
        + _tagged('<parameter name="{{ k }}">', "</parameter>\n")
        + "</invoke>\n{% endfor %}",
        "</minimax:tool_call>",
    ),
    "seed_oss": _BEGIN
    + "{% if m.thinking %}<seed:think>{{ m.thinking }}</seed:think>{% endif %}{{ m.content or '' }}"
    + _EACH
    + "\n<seed:tool_call>\n<function={{ f.name }}>\n"
    + _tagged("<parameter={{ k }}>", "</parameter>\n")
    + "</function>\n</seed:tool_call>{% endfor %}",
    "ernie45": _hermes(_wrapped("<response>\n", "\n</response>")),
    "hunyuan": _wrapped("<answer>\n", "\n</answer>") + _if_calls("<tool_calls>[", _LIST, "]</tool_calls>"),
    "hunyuan_v3": _THINK
    + _if_calls(
        "<tool_calls>\n",
        _EACH + "<tool_call>{{ f.name }}<tool_sep>\n" + _tagged(_GLM, "</arg_value>\n") + "</tool_call>\n{% endfor %}",
        "</tool_calls>",
    ),
    "nemotron": _THINK + _if_calls("<TOOLCALL>[", _LIST, "]</TOOLCALL>"),
    "phi4": _THINK + _if_calls("<|tool_call|>[", _LIST, "]<|/tool_call|>"),
    "apertus": _BEGIN
    + "{% if m.thinking %}<|inner_prefix|>{{ m.thinking }}<|inner_suffix|>{% endif %}{{ m.content or '' }}"
    + _if_calls(
        "<|tools_prefix|>[",
        _EACH + "{{ ', ' if not loop.first }}{{ {f.name: f.arguments} | tojson }}{% endfor %}",
        "]<|tools_suffix|>",
    ),
    "cohere": _BEGIN
    + "{% if m.thinking %}<|START_THINKING|>{{ m.thinking }}<|END_THINKING|>{% endif %}"
    + "{% if m.content %}<|START_RESPONSE|>{{ m.content }}<|END_RESPONSE|>{% endif %}"
    + _if_calls(
        "<|START_ACTION|>[\n",
        _EACH
        + '    {"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ f.name }}", "parameters": '
        + "{{ f.arguments | tojson }}}{{ ',' if not loop.last }}\n{% endfor %}",
        "]<|END_ACTION|>",
    ),
    "xlam": _THINK + _if_calls("[", _LIST, "]"),
    "json": _THINK + _if_calls("[", _LIST, "]"),
}


def message(thought=None, text=None, *calls):
    """Return an assistant's message."""
    return {
        "role": "assistant",
        "content": text,
        "thinking": thought,
        "tool_calls": [{"function": {"name": name, "arguments": arguments}} for name, arguments in calls],
    }


def rendered(family, thought=None, text=None, *calls):
    """Return a message as its family's template renders it."""
    return render(TEMPLATES[family], [message(thought, text, *calls)])


def tokenizer_of(family=None):
    """Return a tokenizer of bytes, in which the marks of a family are tokens; None: of no family."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|eos|>", special=True)])
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|eos|>")
    made.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks_of(family)])
    return made


def tokenizer_with(family):
    """Return a tokenizer with the family's tokens, and a template for whole conversations."""
    tokenizer = tokenizer_of(family)
    answer = TEMPLATES[family].replace(_BEGIN, "{% set calls = m.tool_calls or [] %}")
    tokenizer.chat_template = (
        "{{ tools | tojson if tools }}{% for m in messages %}[{{ m.role }}]{% if m.role == 'assistant' %}"
        + answer
        + "{% else %}{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    return tokenizer


def marks_of(family):
    """Return the marks of a family that look like tokens."""
    from jpaged.answers.marks import Marks

    if family is None:
        return []
    return list(Marks(ANSWER_FORMATS[family].texts(), lambda text: 0 if _is_token(text) else None).tokens)


def _is_token(text):
    tokens = ("<|", "<｜tool", "[TOOL", "[ARGS", "[CALL", "[THINK", "[/THINK", "<escape", "<start_f", "<end_f")
    return text.startswith(
        (*tokens, "<tool_call|", "<channel|", "<think", "</think", "<tool_call>", "</tool_call>")
    ) and (text.count("<") + text.count("[") == 1)


def as_json(values):
    return json.loads(json.dumps(values))
