"""Pin what texts and stop strings have to be: writes tests/text/data/text_cases.json.

    python scripts/pin_text_cases.py

The judge of a text is transformers' decode of all tokens at once; where a sequence stops is found in these texts, token
by token, by vLLM's rule as its documentation and its outputs show it: the first token after the first min_tokens whose
text completes a stop string ends the sequence. (Of stops that one token completes, each case here has one that ends
first.) Nothing of jpaged's own decoding is used; the tokenizer is the demo model's.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from jpaged.loading.source import resolve_source
from jpaged.loading.tokenizer import load_tokenizer

PATH = Path(__file__).parents[1] / "tests" / "text" / "data" / "text_cases.json"
UNFINISHED = "\ufffd"
TEXTS = [
    "The meeting was moved from May 2017 to 2018-12-20, then to 018-12 and back to 2018-12-20 again.",
    "I like 😀 and 👩‍👩‍👧‍👦, and you? 🇫🇷 Vive la 日本語 और 한국어!",
    "def f(x):\n    return x * 2\n\n\nprint(f(21))  # 42\n",
    "naïve café — “quotes” … ¿qué? ñandú",
    "STOP STOPPING STOP! SToP\n\nUser: hi\nAssistant: hello\n\nUser:",
]


def text_behind(tokenizer: Any, prompt: list[int], output: list[int]) -> str:
    """Return what the output's tokens add to the prompt's text, with the tokens that it leaves inside a character."""
    shown = len(prompt)
    while tokenizer.decode(prompt[:shown]).endswith(UNFINISHED):
        shown -= 1
    return tokenizer.decode(prompt + output)[len(tokenizer.decode(prompt[:shown])) :]


def ended(tokenizer: Any, case: dict[str, Any]) -> dict[str, Any]:
    """Return how the case ends: its text, its tokens and the stop string."""
    prompt, output = case["prompt"], case["output"]
    settled = [""]
    for n in range(1, len(output) + 1):
        text = text_behind(tokenizer, prompt, output[:n])
        unfinished = text.endswith(UNFINISHED) and n < len(output)  # such tokens are held back, as vLLM does
        settled.append(settled[-1] if unfinished else text)
    for n in range(case["min_tokens"] + 1, len(output) + 1):
        ends = [
            (end, place, stop)
            for place, stop in enumerate(case["stop"])
            for end in range(len(settled[n - 1]) + 1, len(settled[n]) + 1)
            if settled[n][:end].endswith(stop)
        ]
        if ends:
            end, _, stop = min(ends)
            text = settled[n][: end if case["include_stop_str_in_output"] else end - len(stop)]
            return {"text": text, "num_tokens": n, "stop_reason": stop}
    return {"text": settled[-1], "num_tokens": len(output), "stop_reason": None}


def cases(tokenizer: Any) -> list[dict[str, Any]]:
    """Return texts cut into prompt and output at random tokens, with random stop strings out of the output."""
    draw, made = random.Random(11), []
    for number in range(240):
        text = TEXTS[number % len(TEXTS)]
        ids = tokenizer.encode(text)
        cut = draw.randrange(1, len(ids) - 4)
        rest = tokenizer.decode(ids[cut:]).strip(UNFINISHED)
        starts = [draw.randrange(len(rest) - 2) for _ in range(draw.randrange(3))]
        stops = list(dict.fromkeys(rest[at : at + draw.randint(1, 6)] for at in starts))
        made.append(
            {
                "prompt": ids[:cut],
                "output": ids[cut:],
                "stop": [stop for stop in stops if UNFINISHED not in stop],
                "min_tokens": draw.choice([0, 0, 3, 7, 12]),
                "include_stop_str_in_output": draw.random() < 0.3,
            }
        )
    return made


def of_vllm(tokenizer: Any) -> dict[str, Any]:
    """Return a case that vLLM ran: min_tokens=12 and stop=["018-"] ended it at 14 tokens, though "018-" begins at the
    eleventh."""
    ids = tokenizer.encode("The date in the file's own name is 2018-12-20, which is right")
    first = next(i for i in range(len(ids)) if tokenizer.decode(ids[i : i + 4]) == "018-")
    case = {"prompt": ids[: first - 10], "output": ids[first - 10 :], "stop": ["018-"], "min_tokens": 12}
    expected = {"text": tokenizer.decode(ids[first - 10 : first]), "num_tokens": 14, "stop_reason": "018-"}
    return {**case, "include_stop_str_in_output": False, "expected": expected}


def main() -> None:
    tokenizer = load_tokenizer(resolve_source("smollm2-135m"))
    pinned = [of_vllm(tokenizer)]
    pinned += [{**case, "expected": ended(tokenizer, case)} for case in cases(tokenizer)]
    PATH.parent.mkdir(exist_ok=True)
    lines = ",\n".join(json.dumps(case, ensure_ascii=True) for case in pinned)
    PATH.write_text(f"[\n{lines}\n]\n")
    stopped = sum(case["expected"]["stop_reason"] is not None for case in pinned)
    print(f"{PATH}: {len(pinned)} cases, {stopped} of which a stop string ends")


if __name__ == "__main__":
    main()
