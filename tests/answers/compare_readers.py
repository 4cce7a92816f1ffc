"""Compares what jpaged, vLLM's parsers and transformers' parse_response read in the same texts.

``PYTHONPATH=tests/answers:. python tests/answers/compare_readers.py ENV [--page]`` runs all three. ENV is the
environment that ``scripts/benchmarks/peer_engines/environment.sh vllm-core ENV`` makes. ``--page`` writes
the texts in which they differ into docs/answer_readers.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from pathlib import Path

from renderings import rendered, tokenizer_of
from test_response_template import FUNCTION, OF_FAMILIES
from transformers.utils.chat_parsing import parse_response

from jpaged.answers.bound import BoundFormat
from jpaged.answers.parts import CallArguments, CallCut, CallStart, Content, Reasoning
from jpaged.answers.rows import ANSWER_FORMATS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "answer_readers.md"
BEGIN, END = "<!-- differences -->\n", "<!-- /differences -->"
PARSERS = {  # a row, and the parsers of the same family in vLLM
    "hermes": "hermes",
    "qwen3_coder": "qwen3_coder",
    "llama3": "llama3_json",
    "pythonic": "pythonic",
    "mistral": "mistral",
    "gemma4": "gemma4",
    "glm45": "glm45",
    "deepseek_v3": "deepseek_v3",
    "deepseek_v31": "deepseek_v31",
    "kimi_k2": "kimi_k2",
    "lfm2": "lfm2",
    "phi4": "phi4_mini_json",
    "minimax_m2": "minimax_m2",
    "seed_oss": "seed_oss",
    "xlam": "xlam",
}
TOOLS = [{"type": "function", "function": FUNCTION}]
ONE = ("look_up", {"city": "Rome", "days": 3})
TWO = ("look_up", {"city": "12"})
MARKED = [name for name in PARSERS if ANSWER_FORMATS[name].calls[0].begin]
WORKER = r"""
import json, sys
from transformers import AutoTokenizer
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.tool_parsers import ToolParserManager

def shown(calls):
    return [[one[0], one[1]] for one in calls]

def whole(parser, text, request):
    found = parser.extract_tool_calls(text, request)
    calls = [(one.function.name, one.function.arguments) for one in found.tool_calls]
    return [found.content, shown(calls)]

def streamed(parser, tokenizer, text, request):
    content, calls, before, ids = "", [], "", []
    for token in tokenizer.encode(text, add_special_tokens=False):
        after = tokenizer.decode([*ids, token])
        delta = parser.extract_tool_calls_streaming(
            before, after, after[len(before):], ids, [*ids, token], [token], request
        )
        before, ids = after, [*ids, token]
        if delta is None:
            continue
        content += delta.content or ""
        for one in delta.tool_calls or ():
            while len(calls) <= one.index:
                calls.append(["", ""])
            function = one.function
            if function is not None:
                calls[one.index][0] += function.name or ""
                calls[one.index][1] += function.arguments or ""
    return [content, shown(calls)]

out = []
for case in json.load(sys.stdin):
    tokenizer = AutoTokenizer.from_pretrained(case["tokenizer"])
    request = ChatCompletionRequest(messages=[{"role": "user", "content": "a"}], model="m", tools=case["tools"])
    found = []
    for read in ("whole", "streamed"):
        try:
            made = ToolParserManager.get_tool_parser(case["parser"])(tokenizer, request.tools)
            text = case["text"]
            one = whole(made, text, request) if read == "whole" else streamed(made, tokenizer, text, request)
        except Exception as error:
            one = [f"raises {type(error).__name__}", []]
            print(case["parser"], repr(error)[:300], file=sys.stderr)
        found.append(one)
    out.append(found)
print("RESULT" + json.dumps(out))
"""


def cases():
    """Yield a row, what a text has, and the text."""
    for family in PARSERS:
        whole = rendered(family, None, None, ONE)
        both = rendered(family, None, None, ONE, TWO)
        yield family, "two calls, one with digits as a text", both
        if family in MARKED:
            begin = ANSWER_FORMATS[family].calls[0].begin
            yield family, "text before a call", rendered(family, None, "I look it up.", ONE)
            yield family, "a mark in prose", f"A call begins with {begin} in this model."
            yield family, "text after a call", f"{whole}\nDone."
        yield family, "a call that is cut off", whole[: whole.index("Rome") + 2]
        yield family, "a call whose arguments are broken", whole.replace("Rome", 'Ro"me').replace("3", "3 3")


def own(family, text):
    """Return what jpaged reads, whole and streamed."""
    form = BoundFormat(ANSWER_FORMATS[family], tokenizer_of(family))
    made = []
    for size in (len(text), 1):
        reader = form.reader(functions=[FUNCTION])
        parts = [part for at in range(0, len(text), size) for part in reader.push(text[at : at + size])]
        content, calls, cut = "", [], ""
        for part in [*parts, *reader.finish()]:
            if isinstance(part, Content | Reasoning):
                content += part.text
            elif isinstance(part, CallStart):
                calls.append([part.name, ""])
            elif isinstance(part, CallArguments):
                calls[-1][1] += part.text
            elif isinstance(part, CallCut):
                cut = " (cut)"
        made.append([content + cut, calls])
    return made


def of_transformers(family, text):
    """Return what transformers reads; None: it has no template of the family here."""
    if family not in OF_FAMILIES:
        return None
    try:
        found = parse_response(text, OF_FAMILIES[family], prefix="", tools=TOOLS)
    except Exception as error:
        return [f"raises {type(error).__name__}", []]
    calls = found.get("tool_calls", [])
    each = [one["function"] for call in calls for one in (call if isinstance(call, list) else [call])]
    return [found.get("content", ""), [[one["name"], json.dumps(one["arguments"])] for one in each]]


def plain(found):
    """Return a finding whose texts are stripped and whose arguments are values."""
    content, calls = found
    read = []
    for name, arguments in calls:
        try:
            read.append((name, json.loads(arguments)))
        except ValueError:
            read.append((name, arguments))
    return (content or "").strip(), read


def said(found):
    """Return a finding for a table."""
    content, calls = plain(found)
    each = [f"{name} {json.dumps(arguments)}" for name, arguments in calls]
    parts = ([repr(content)] if content else []) + each
    return "<br>".join(f"`{one}`" for one in parts).replace("|", r"\|") or "nothing"


def main(environment, page):
    each = list(cases())
    with tempfile.TemporaryDirectory() as folder:
        asked = []
        for family, _, text in each:
            path = Path(folder) / family
            if not path.exists():
                tokenizer_of(family).save_pretrained(path)
            asked.append({"parser": PARSERS[family], "text": text, "tools": TOOLS, "tokenizer": str(path)})
        command = [f"{environment}/bin/python", "-c", WORKER]
        done = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True, check=False)
    line = next((one for one in done.stdout.splitlines() if one.startswith("RESULT")), None)
    if line is None:
        raise SystemExit(done.stderr[-3000:])
    if "ModuleNotFoundError" in line:
        raise SystemExit(f"vLLM's environment lacks a package\n{done.stderr[-3000:]}")
    rows, same = [], 0
    for (family, what, text), theirs in zip(each, json.loads(line.removeprefix("RESULT")), strict=True):
        ours, judge = own(family, text), of_transformers(family, text)
        assert plain(ours[0]) == plain(ours[1]), (family, text, ours)
        others = [*theirs, *([judge] if judge else [])]
        if all(plain(one) == plain(ours[0]) for one in others):
            same += 1
            continue
        cells = [said(ours[0]), *(said(one) for one in theirs), said(judge) if judge else "-"]
        cells = [cells[0], *("same" if one == cells[0] else one for one in cells[1:])]
        rows.append(f"| `{family}` | {what} | {' | '.join(cells)} |")
    head = "| row | a text with | jpaged | vLLM, whole | vLLM, streamed | transformers |\n|---|---|---|---|---|---|\n"
    table = f"{same} of {len(each)} texts are read alike.\n\n{head}" + "\n".join(rows) + "\n"
    print(table)
    if page:
        before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n{table}\n{END}{rest.split(END)[1]}", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("env")
    parser.add_argument("--page", action="store_true")
    chosen = parser.parse_args()
    main(chosen.env, chosen.page)
