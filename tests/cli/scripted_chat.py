"""Runs ``jpaged chat`` over a model that answers by a table, so that its transcript is the same on every machine."""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext
from types import SimpleNamespace

ANSWERS = {
    "Name a river.": "The **Elbe**.",
    "And a longer one?": "<think>Longer than 1,094 km.</think>\n\nThe **Danube**, 2,850 km.",
    "Count to a thousand.": " ".join(map(str, range(1, 1001))),
    "Which was the first?": "I no longer see it.",
}


class Scripted:
    """An engine whose tokens are words, with 32 of context."""

    max_model_len = 32
    tokenizer = None

    def __init__(self, model: str, **settings: object) -> None:
        self.control = SimpleNamespace(compilation_notes=nullcontext)

    def answer_formats(self) -> object:
        from jpaged.text.answer_choice import chosen_formats

        return chosen_formats(self.tokenizer)

    def chat_prompt(self, messages: list[dict[str, str]]) -> dict[str, object]:
        words = [word for message in messages for word in [message["role"], *message["content"].split()]]
        return {"prompt": messages[-1]["content"], "prompt_token_ids": words}

    def stream(self, prompt: dict[str, object], params: object):
        if len(prompt["prompt_token_ids"]) > self.max_model_len:
            raise ValueError(f"prompt 0: the prompt has {len(prompt['prompt_token_ids'])} tokens")
        room = self.max_model_len - len(prompt["prompt_token_ids"])
        most = min(getattr(params, "max_tokens", None) or room, max(room, 1))
        return self._deltas(ANSWERS.get(str(prompt["prompt"]), str(prompt["prompt"])), most)

    def _deltas(self, answer: str, most: int):
        words = answer.split(" ")
        for i, word in enumerate(words[:most]):
            if i == 5 and len(answer) > 1000:
                sys.stdout.flush()
                time.sleep(60)  # until Ctrl-C
            ending = "stop" if i + 1 == len(words) else "length" if i + 1 == most else None
            text = word if i == 0 else f" {word}"
            yield SimpleNamespace(text=text, token_ids=[i], finish_reason=ending, added_token_spans=[])


if __name__ == "__main__":
    sys.modules["jpaged.llm"] = SimpleNamespace(LLM=Scripted)  # type: ignore[assignment]
    from jpaged.cli.main import app

    app(["chat", *sys.argv[1:]])
