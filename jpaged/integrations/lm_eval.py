"""Evaluates a model with the Language Model Evaluation Harness: ``jpaged eval`` (``pip install ".[eval]"``).

lm_eval finds models in a table of its own, without entry points, so `evaluate` adds a row and calls its command line.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from jpaged.llm import LLM
from jpaged.sampling_params import SamplingParams

NAME = "jpaged"
"""The model's name in lm_eval's table and results."""
SCORE = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
"""A score needs the prompt's log-probabilities alone, but every request draws a token."""


def evaluate(llm: LLM, arguments: Sequence[str]) -> None:
    """Run lm_eval's command line over an engine.

    Args:
        arguments: lm_eval's options, such as ``["--tasks", "arc_easy", "--limit", "100"]``.
    """
    from lm_eval.__main__ import cli_evaluate

    class Served(EvaluatedModel):
        def __init__(self, **_: Any) -> None:  # lm_eval makes it of its --model_args, and the engine exists already
            super().__init__(llm)

    register_model(NAME)(Served)
    before = sys.argv
    sys.argv = ["lm_eval", "run", "--model", NAME, *arguments]
    try:
        cli_evaluate()
    finally:
        sys.argv = before


class EvaluatedModel(TemplateLM):
    """An engine as lm_eval asks it: log-likelihoods of continuations and of whole texts, and generated text."""

    def __init__(self, llm: LLM) -> None:
        super().__init__()
        self.tokenizer = llm.get_tokenizer()
        self.max_gen_toks = 256
        self._llm = llm

    @property
    def max_length(self) -> int:
        """Return the most tokens of a prompt, after which a token is drawn."""
        return self._llm.max_model_len - 1

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """Return the token before a text that has no context."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer.name_or_path.replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        prompt = self._llm.chat_prompt(
            chat_history,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        return prompt["prompt"]

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return a text's tokens, by default with those that the tokenizer adds, but never with a second BOS."""
        if add_special_tokens is None:
            bos = self.tokenizer.bos_token
            add_special_tokens = not (bos and string.startswith(bos))
        return self.tokenizer.encode(string, add_special_tokens=add_special_tokens)

    def _loglikelihood_tokens(self, requests: list[Any], disable_tqdm: bool = False, **_: Any) -> list[Any]:
        """Return the (log-probability, whether greedy decoding gives it) of each continuation."""
        prompts = [[*context, *continuation][-self.max_length :] for _, context, continuation in requests]
        batch = [{"prompt_token_ids": ids} for ids in prompts]
        outputs = self._llm.generate(batch, SCORE, use_tqdm=not disable_tqdm) if batch else []
        scores = []
        for (texts, _, continuation), ids, output in zip(requests, prompts, outputs, strict=True):
            assert output.prompt_logprobs is not None
            first = max(1, len(ids) - len(continuation))  # a prompt's first token has no log-probability
            entries = [output.prompt_logprobs[i][ids[i]] for i in range(first, len(ids))]  # type: ignore[index]
            score = sum(entry.logprob for entry in entries), all(entry.rank == 1 for entry in entries)
            scores.append(score)
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, score)
        return scores

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-probability of each whole text, in windows of the context's length."""
        windows, of = [], []
        for i, request in enumerate(requests):
            (text,) = request.args
            rolling = get_rolling_token_windows(
                self.tok_encode(text, add_special_tokens=False), self.prefix_token_id, self.max_length - 1, 1
            )
            for context, continuation in map(make_disjoint_window, rolling):
                windows.append((None, context, continuation))
                of.append(i)
        totals = [0.0] * len(requests)
        for i, (logprob, _) in zip(of, self._loglikelihood_tokens(windows, disable_tqdm), strict=True):
            totals[i] += logprob
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the text that follows each context, up to a stop string; long contexts lose their beginning."""
        prompts, params = [], []
        for context, options in (request.args for request in requests):
            chosen = self._params(options)
            assert chosen.max_tokens is not None
            most = max(1, self.max_length + 1 - chosen.max_tokens)
            prompts.append({"prompt_token_ids": self.tok_encode(context)[-most:]})
            params.append(chosen)
        outputs = self._llm.generate(prompts, params, use_tqdm=not disable_tqdm) if prompts else []
        texts = [output.outputs[0].text for output in outputs]
        for request, text in zip(requests, texts, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts

    def _params(self, options: dict[str, Any]) -> SamplingParams:
        """Translate a task's ``generation_kwargs``; what SamplingParams does not know is refused."""
        given = dict(options)
        until = given.pop("until", None) or []
        most = min(given.pop("max_gen_toks", self.max_gen_toks), self.max_length)
        if not given.pop("do_sample", given.get("temperature", 0) > 0):
            given["temperature"] = 0.0
        return SamplingParams(stop=[until] if isinstance(until, str) else until, max_tokens=most, **given)
