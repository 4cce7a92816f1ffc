"""The parts of lm_eval that `jpaged.integrations.lm_eval` imports, where it is not installed; a nightly test takes the
real ones."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace


class TemplateLM:
    """Encodes pairs and whole texts as lm_eval's class does, and hands tokens to the model."""

    def __init__(self):
        self.cached = []
        self.cache_hook = SimpleNamespace(add_partial=lambda *call: self.cached.append(call))

    def loglikelihood(self, requests, disable_tqdm=False):
        pairs = []
        for context, continuation in (request.args for request in requests):
            whole, begun = self.tok_encode(context + continuation), self.tok_encode(context)
            pairs.append(((context, continuation), begun, whole[len(begun) :]))
        return self._loglikelihood_tokens(pairs, disable_tqdm=disable_tqdm)


def get_rolling_token_windows(token_list, prefix_token, max_seq_len, context_len):
    """Yield (tokens before, tokens to predict): each token is predicted once, with at least one before it."""
    assert context_len == 1
    for start in range(0, len(token_list), max_seq_len):
        inputs = [prefix_token, *token_list[:-1]][start : start + max_seq_len]
        yield inputs, token_list[start : start + max_seq_len]


def make_disjoint_window(pair):
    inputs, predicted = pair
    return inputs[: len(inputs) - (len(predicted) - 1)], predicted


def install(monkeypatch) -> None:
    """Make the stand-in importable."""
    parts = {
        "lm_eval": {},
        "lm_eval.api": {},
        "lm_eval.api.model": {"TemplateLM": TemplateLM},
        "lm_eval.api.registry": {"register_model": lambda name: lambda cls: cls},
        "lm_eval.utils": {
            "get_rolling_token_windows": get_rolling_token_windows,
            "make_disjoint_window": make_disjoint_window,
        },
    }
    for name, content in parts.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "jpaged.integrations.lm_eval", raising=False)
