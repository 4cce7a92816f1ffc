"""Reads the metadata that most architectures share, rope scaling among it, under the names of Hugging Face's configs.

A file may store the frequencies that result from a scaling instead of its parameters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from jpaged.loading.gguf.reader import GGUFFile

LOCAL, GLOBAL = "sliding_attention", "full_attention"
"""Entries of ``layer_types``."""
LONG_FACTORS, SHORT_FACTORS = (f"rope_factors_{length}.weight" for length in ("long", "short"))
"""Tensors with the divisors of frequencies of a longrope."""


def field(file: GGUFFile, key: str, default: Any = None) -> Any:
    """Return the value of ``{architecture}.{key}``; without a default, a missing key raises ValueError."""
    full = f"{file.metadata['general.architecture']}.{key}"
    value = file.metadata.get(full, default)
    if value is None:
        raise ValueError(f"{file.path}: GGUF metadata has no {full}")
    return value


def first_layer_has(file: GGUFFile, tensor: str) -> bool:
    """Return whether the file has this tensor of the first layer, such as ``attn_q.bias``."""
    return f"blk.0.{tensor}" in file.tensors


def shortest(value: float) -> float:
    """Return the shortest decimal number of a float32: 1e-05 rather than 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def every_model(file: GGUFFile) -> dict[str, Any]:
    """Return the fields of any language model: its vocabulary, width and depth."""
    metadata = file.metadata
    if "token_embd.weight" not in file.tensors:
        raise ValueError(f"{file.path} has no tensor token_embd.weight: it holds no model's weights")
    return {
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": field(file, "embedding_length"),
        "num_hidden_layers": field(file, "block_count") - field(file, "nextn_predict_layers", 0),
        "max_position_embeddings": field(file, "context_length"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
    }


def types_of_layers(file: GGUFFile, layers: int, every: int, *, first: bool = False) -> list[str]:
    """Return ``layer_types``: as the file lists which layers slide, or all slide but every n-th.

    Args:
        every: n where the file does not say it.
        first: whether the first of n layers does not slide, rather than the last.

    Raises:
        ValueError: the file lists another number of layers.
    """
    slides = field(file, "attention.sliding_window_pattern", every)
    if not isinstance(slides, list):
        slides = [(number + (not first)) % slides != 0 for number in range(layers)]
    if len(slides) != layers:
        raise ValueError(f"{file.path}: attention.sliding_window_pattern has {len(slides)} entries for {layers} layers")
    return [LOCAL if local else GLOBAL for local in slides]


def transformer(
    file: GGUFFile,
    *,
    rotates: bool = True,
    partial: bool = False,
    rope_types: Sequence[str] = (),
    eps: str = "rms_norm_eps",
    has_mlp: bool = True,
) -> dict[str, Any]:
    """Return the fields of a model whose layers attend, and whose MLPs are gated.

    Args:
        rotates: whether positions are known by rotation; the fields then include ``rope_parameters``.
        partial: whether a part of each head may be rotated, which ``rope_parameters`` then names.
        rope_types: kinds of scaling that the caller reads.
        eps: the config's name of the norms' epsilon; others than RMS norms have their own key.
        has_mlp: whether layers have MLPs, whose width is then in the file.

    Raises:
        ValueError: a rope scaling that is not supported, or a missing key; names it.
    """
    heads = field(file, "attention.head_count")
    if isinstance(heads, list):
        raise ValueError(f"{file.path}: attention.head_count={heads}: numbers of heads by layer are not supported")
    needed = {
        "attention.head_count": heads,
        "attention.head_count_kv": _largest(field(file, "attention.head_count_kv", heads)),
        "feed_forward_length": field(file, "feed_forward_length", None if has_mlp else 1),
    }
    if nothing := [key for key, value in needed.items() if value == 0]:
        raise ValueError(f"{file.path}: {nothing[0]}=0 must be positive")
    head_dim = field(file, "attention.key_length", field(file, "embedding_length") // heads)
    found = every_model(file) | {
        "intermediate_size": needed["feed_forward_length"],
        "num_attention_heads": heads,
        "num_key_value_heads": needed["attention.head_count_kv"],
        "head_dim": head_dim,
        eps: shortest(field(file, f"attention.layer_norm_{'rms_' if eps == 'rms_norm_eps' else ''}epsilon")),
    }
    if rotates:
        rotated = field(file, "rope.dimension_count", head_dim)
        if rotated != head_dim and not partial:
            raise ValueError(f"{file.path}: rope.dimension_count={rotated} of head size {head_dim}: not supported")
        theta = shortest(field(file, "rope.freq_base", 10000.0))
        # llama.cpp knows longrope by its factors: most files do not name it.
        named = file.metadata.get(f"{file.metadata['general.architecture']}.rope.scaling.type")
        kind = "longrope" if LONG_FACTORS in file.tensors else named
        if kind in rope_types:
            found["rope_parameters"] = {"rope_theta": theta, "rope_type": kind}
        else:
            found["rope_parameters"] = rope_parameters(file, theta, rotated)
        if partial:
            found["rope_parameters"]["partial_rotary_factor"] = rotated / head_dim
    return found


def whole_width(file: GGUFFile, **options: Any) -> dict[str, Any]:
    """Return the fields of a transformer whose heads together are as wide as its hidden states.

    Args:
        options: see `transformer`.

    Raises:
        ValueError: they are not.
    """
    fields = transformer(file, **options)
    head_dim, embed = fields.pop("head_dim"), fields["hidden_size"]
    if head_dim * fields["num_attention_heads"] != embed:
        raise ValueError(f"{file.path}: attention.key_length={head_dim} is not embedding_length / head_count")
    return fields


def _largest(heads: int | list[int]) -> int:
    """Return the largest number of heads; a list has one per layer, 0 for layers that do not attend."""
    return max(heads) if isinstance(heads, list) else heads


def rope_parameters(file: GGUFFile, theta: float, head_dim: int) -> dict[str, Any]:
    """Return the ``rope_parameters`` of a config, for rotation by ``theta ** (-2 i / head_dim)``.

    Raises:
        ValueError: the scaling is not supported, or the file lacks some of its parameters; names it.
    """
    arch = file.metadata["general.architecture"]
    scaled = f"{arch}.rope.scaling.attn_factor"
    attn_factor = file.metadata.get(scaled, 1.0)
    if attn_factor != 1.0 and file.metadata.get(f"{arch}.rope.scaling.type") != "yarn":
        raise ValueError(f"{file.path}: {scaled}={attn_factor} is supported with rope.scaling.type='yarn' only")
    if "rope_freqs.weight" in file.tensors:
        return {"rope_theta": theta, **_llama3(file, theta, head_dim)}
    # As llama.cpp does: old files, written before kinds of scaling existed, have only a divisor of positions.
    divisors = (f"{arch}.rope.scaling.factor", f"{arch}.rope.scale_linear")
    factor = next((file.metadata[name] for name in divisors if name in file.metadata), 0.0)
    kind = file.metadata.get(f"{arch}.rope.scaling.type", "linear" if factor not in (0.0, 1.0) else "none")
    if kind == "none":
        return {"rope_theta": theta, "rope_type": "default"}
    known = _SCALINGS | _SCALINGS_OF.get(arch, {})
    if kind not in known:
        names = " and ".join(["none", *known])
        raise ValueError(f"{file.path}: rope.scaling.type={kind!r} is not supported; {names} are")
    rope: dict[str, Any] = {"rope_theta": theta, "rope_type": kind}
    if kind == "linear" and factor:
        return rope | {"factor": factor}
    for name, key in known[kind].items():
        if f"{arch}.rope.scaling.{key}" not in file.metadata:
            raise ValueError(f"{file.path}: GGUF metadata has no {arch}.rope.scaling.{key}")
        rope[name] = file.metadata[f"{arch}.rope.scaling.{key}"]
    if kind != "yarn":
        return rope
    beginning = f"{arch}.rope.scaling.yarn_"
    own = {key.removeprefix(beginning): value for key, value in file.metadata.items() if key.startswith(beginning)}
    for key, value in own.items():
        if key in _YARN_BORDERS:
            rope[key] = value
        elif key == "log_multiplier" and arch == "deepseek2":  # llama.cpp writes a tenth, and takes both for alike
            rope |= dict.fromkeys(("mscale", "mscale_all_dim"), shortest(10 * value))
        elif key == "log_multiplier" and arch == "mistral3":
            rope |= {"mscale": 1.0, "mscale_all_dim": shortest(value)}
        elif (key, value) not in _NEUTRAL:
            raise ValueError(f"{file.path}: {beginning}{key}={value} is not supported")
    if arch in _SAYS_MAGNITUDE and "mscale" not in rope:
        raise ValueError(f"{file.path}: GGUF metadata has no {beginning}log_multiplier")
    if attn_factor != 1.0:  # llama.cpp multiplies YaRN's own factor by it; a config holds the product
        rope["attention_factor"] = attn_factor * (1.0 + 0.1 * math.log(rope["factor"]))
    # GPT-OSS does not round YaRN's borders; its files do not say so.
    return rope | {"truncate": False} if arch == "gpt-oss" else rope


_SCALINGS: dict[str, dict[str, str]] = {"linear": {"factor": "factor"}}
_YARN_BORDERS = ("beta_fast", "beta_slow")
_SAYS_MAGNITUDE = ("deepseek2", "mistral3")
"""Architectures whose files say by which power of the factor YaRN multiplies queries and keys."""
_NEUTRAL = (("ext_factor", 1.0), ("attn_factor", 1.0))
"""YaRN's settings with the values that change nothing."""
_YARN = {"yarn": {"factor": "factor", "original_max_position_embeddings": "original_context_length"}}
_SCALINGS_OF: dict[str, dict[str, dict[str, str]]] = dict.fromkeys(
    ("deepseek2", "mistral3", "olmo2", "gpt-oss", "qwen2", "qwen2vl", "qwen3", "qwen3vl", "qwen3moe", "qwen3vlmoe"),
    _YARN,
)
"""Maps an architecture to its further scalings: each with its parameters and their keys under ``rope.scaling``.
`_SCALINGS` has those of all architectures."""

_LLAMA3_FACTORS = ((1.0, 4.0), (1.0, 1.0))
"""Llama 3's and Llama 4's ``low_freq_factor`` and ``high_freq_factor``."""


def _llama3(file: GGUFFile, theta: float, head_dim: int) -> dict[str, Any]:
    """Find the parameters of Llama 3.1's scaling: files hold only the divisors of the frequencies that result from
    it."""
    divisors = np.asarray(file.stored_rows("rope_freqs.weight"), np.float32)
    factor = float(divisors.max())
    turns = 8192 / (2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim))
    for low, high in _LLAMA3_FACTORS:
        smooth = np.clip((turns - low) / (high - low), 0.0, 1.0) if high > low else (turns >= low).astype(float)
        expected = 1 / ((1 - smooth) / factor + smooth)
        if divisors.shape == expected.shape and np.allclose(divisors, expected, rtol=1e-3):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": 8192,
            }
    raise ValueError(f"{file.path}: rope_freqs.weight is not Llama 3's rope scaling; not supported")
