"""Measures what formats that quantise activations too would change: the weights alone against weights and activations.

Both run on PyTorch in float32, so that only the rounding differs. jpaged applies that of the weights alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from jpaged.loading.model_config import as_transformers
from jpaged.loading.open_checkpoint import open_model
from jpaged.loading.tokenizer import load_tokenizer
from scripts.cases import Row

Round = Callable[[torch.Tensor], torch.Tensor]

WINDOW = 256
_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def _scale(values: torch.Tensor, largest: Any, code: float) -> torch.Tensor:
    """Return what makes the largest code of each row's largest magnitude, or of a given one."""
    most = values.abs().amax(-1, keepdim=True) if largest is None else torch.as_tensor(largest)
    return most.clamp(min=1e-12) / code


def int8(values: torch.Tensor, largest: Any = None) -> torch.Tensor:
    """Round each row by its own scale, or all by that of the `largest` magnitude."""
    scale = _scale(values, largest, 127)
    return (values / scale).round().clamp(-128, 127) * scale


def float8(values: torch.Tensor, largest: Any = None) -> torch.Tensor:
    """Round to float8_e4m3fn, scaled as in `int8`."""
    scale = _scale(values, largest, 448)
    return (values / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


def nvfp4(values: torch.Tensor, largest: Any = None) -> torch.Tensor:
    """Round to e2m1 in groups of 16 with a float8 scale each, and one scale of all."""
    whole = torch.as_tensor(values.abs().max() if largest is None else largest).clamp(min=1e-12) / (448 * 6)
    groups = values.unflatten(-1, (-1, 16))
    scale = (groups.abs().amax(-1, keepdim=True) / 6 / whole).clamp(2**-9, 448).to(torch.float8_e4m3fn).float() * whole
    parts = (groups / scale).clamp(-6, 6)
    middles = (_E2M1[1:] + _E2M1[:-1]) / 2
    return (_E2M1[torch.bucketize(parts.abs(), middles)] * parts.sign() * scale).flatten(-2)


def llm_int8(values: torch.Tensor, largest: Any = None) -> torch.Tensor:
    """Round each row as `int8`, but for columns with a magnitude above 6 (Dettmers et al., 2022, section 3.2)."""
    outliers = values.abs().flatten(0, -2).amax(0) > 6
    return torch.where(outliers, values, int8(values.masked_fill(outliers, 0)))


FORMATS: dict[str, tuple[Round, Callable[..., torch.Tensor], bool]] = {
    "W8A8, a scale a token": (int8, int8, False),
    "W8A8, static": (int8, int8, True),
    "LLM.int8": (int8, llm_int8, False),
    "FP8, a scale a token": (float8, float8, False),
    "FP8, static": (float8, float8, True),
    "NVFP4, static": (nvfp4, nvfp4, True),
}
"""How each format rounds weights and activations, and whether a layer's scale of activations is fixed beforehand."""


def rounded_activations(text: Path, model: str = "smollm2-135m", tokens: int = 4 * WINDOW) -> Iterator[Row]:
    """Mean difference of log-probabilities, and share of equal greedy tokens, that rounding of activations makes.

    Each position of a text in windows of 256 tokens counts; static scales are the largest magnitudes of another 256.
    """
    judge, encode = _llama(model)
    ids = encode(text.read_text(encoding="utf-8")[: 16 * (tokens + WINDOW)])
    if len(ids) < tokens + WINDOW:
        raise ValueError(f"--text {text} has {len(ids)} tokens, and {tokens + WINDOW} are needed")
    windows = torch.tensor(ids[: tokens + WINDOW]).reshape(-1, WINDOW)
    plain = {name: module.weight.data for name, module in _linear(judge).items()}
    exact = _logprobs(judge, windows[1:])
    for name, (of_weights, of_activations, static) in FORMATS.items():
        for module, layer in _linear(judge).items():
            layer.weight.data = of_weights(plain[module])
        largest = _largest(judge, windows[:1]) if static else {}
        weights_only = _logprobs(judge, windows[1:])
        with _hooks(judge, partial(_rounded, of_activations, largest)):
            faithful = _logprobs(judge, windows[1:])
        yield (
            {"format": name}
            | _difference("activations", faithful, weights_only)
            | _difference("weights", weights_only, exact)
        )


def _rounded(
    by: Callable[..., torch.Tensor], largest: dict[str, torch.Tensor], name: str, values: torch.Tensor
) -> torch.Tensor:
    return by(values, largest.get(name))


def _difference(what: str, found: torch.Tensor, base: torch.Tensor) -> dict[str, float]:
    best = base.argmax(-1, keepdim=True)
    away = (found.gather(-1, best) - base.gather(-1, best)).abs().mean()
    same = (found.argmax(-1, keepdim=True) == best).float().mean()
    return {f"{what}: log-prob": round(float(away), 4), f"{what}: same token": round(float(same), 4)}


@torch.no_grad()
def _logprobs(model: torch.nn.Module, windows: torch.Tensor) -> torch.Tensor:
    return torch.cat([model(window[None]).logits[0].log_softmax(-1) for window in windows])


def _linear(model: torch.nn.Module) -> dict[str, torch.nn.Linear]:
    """Return the layers that are quantised: all but the head."""
    found = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    return {name: module for name, module in found.items() if name != "lm_head"}


@contextmanager
def _hooks(model: torch.nn.Module, change: Callable[[str, torch.Tensor], torch.Tensor]) -> Any:
    """Change the inputs of the quantised layers for a while."""
    hooks = [
        module.register_forward_pre_hook(lambda _, inputs, name=name: (change(name, inputs[0]),))
        for name, module in _linear(model).items()
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _largest(model: torch.nn.Module, windows: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the largest magnitude of each layer's inputs."""
    found: dict[str, torch.Tensor] = {}

    def note(name: str, values: torch.Tensor) -> torch.Tensor:
        found[name] = values.abs().max()
        return values

    with _hooks(model, note):
        _logprobs(model, windows)
    return found


def _llama(name: str) -> tuple[LlamaForCausalLM, Callable[[str], list[int]]]:
    opened = open_model(name)
    config = as_transformers(opened.config)
    if not isinstance(config, LlamaConfig):
        raise ValueError(f"--model {name} is of model_type={config.model_type!r}; a Llama is measured")
    model = LlamaForCausalLM(config).eval().float()
    held = {
        key: torch.tensor(np.asarray(opened.reader.read(key), np.float32))
        for key in model.state_dict()
        if key in set(opened.reader.names())
    }
    absent = [key for key in model.load_state_dict(held, strict=False).missing_keys if key != "lm_head.weight"]
    assert not absent, absent
    model.tie_weights()
    return model, load_tokenizer(opened.source, opened.gguf).encode
