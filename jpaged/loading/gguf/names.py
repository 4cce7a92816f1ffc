"""Maps each tensor of a Hugging Face checkpoint to the GGUF tensors from which it is made.

llama.cpp's converter renames tensors, stacks the matrices of experts, splits those that hold gate and up, and changes
some values; `Stored.undo` reverses these changes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from jpaged.loading.gguf.fields import LONG_FACTORS, SHORT_FACTORS
from jpaged.loading.gguf.reader import GGUFFile
from jpaged.loading.gguf.tables import Names, names_of


@dataclass(frozen=True)
class Stored:
    """Describes how one tensor of a checkpoint is made.

    Attributes:
        names: the file's tensors; several are parts of one, such as gate and up, whose outputs are the last axis;
            empty where the metadata has the values, which `undo` then returns.
        undo: maps stored values, of all `names`, to the checkpoint's values; None = they are equal.
        expert: the expert whose matrix it is, if the file's tensor holds all experts' matrices.
        fused: the checkpoint has all experts in one tensor, [experts, inputs, outputs] or, of biases, [experts,
            outputs]; the file has [experts, outputs, inputs].
        alternating: columns of several parts alternate, instead of one part following another.
        outputs_first: the checkpoint's fused tensor is [experts, outputs, inputs], as the file's.
    """

    names: tuple[str, ...]
    undo: Callable[..., np.ndarray] | None = None
    expert: int | None = None
    fused: bool = False
    alternating: bool = False
    outputs_first: bool = False


_COMPUTED = ("rope_freqs.weight", LONG_FACTORS, SHORT_FACTORS)
"""Tensors that repeat settings of the config."""
DENSE = ("dense_2", "dense_3")
"""EmbeddingGemma's two Dense modules, neither of which has a bias or an activation; no part of the model reads them."""
_ONE_EXPERT = re.compile(r"(ffn_\w+)\.(\d+)")
"""Stem of one expert's matrix in files written before April 2024; later ones have those of a layer in one tensor."""


def stored_tensors(file: GGUFFile) -> dict[str, Stored]:
    """Return the checkpoint's tensors, by name and in the order of the file.

    Tensors with no known name keep their own; the loader then reports them as unused. Layers that draft are left out.
    """
    arch = file.metadata["general.architecture"]
    names = names_of(file)
    drafting = file.metadata.get(f"{arch}.nextn_predict_layers", 0)
    first = file.metadata[f"{arch}.block_count"] - drafting if drafting else None
    found: dict[str, Stored] = _numbers_of_activations(file) if arch == "apertus" else {}
    for name in file.tensors:
        block = _split(name)[0]
        drafts = first is not None and block is not None and block.isdigit() and int(block) >= first
        if name not in _COMPUTED and not drafts:
            found |= _made_of(name, names, file)
    return found


def _numbers_of_activations(file: GGUFFile) -> dict[str, Stored]:
    """Return the numbers of Apertus' activations, of which the metadata has one for each layer, or one for all.

    Raises:
        ValueError: the file lacks them, or has them for another number of layers.
    """
    layers = file.metadata["apertus.block_count"]
    found = {}
    for part, shape in (("alpha_p", (1,)), ("alpha_n", (1,)), ("beta", ()), ("eps", ())):
        listed = file.metadata.get(f"xielu.{part}")
        values = listed if isinstance(listed, list) else [listed] * layers
        if len(values) != layers or not all(isinstance(value, float) and math.isfinite(value) for value in values):
            raise ValueError(
                f"{file.path}: xielu.{part}={str(listed)[:80]} is not a number for each of {layers} layers"
            )
        for layer, value in enumerate(values):
            stored = np.full(shape, value, np.float32)
            found[f"model.layers.{layer}.mlp.act_fn.{part}"] = Stored((), partial(np.copy, stored))
    return found


def unknown_tensors(file: GGUFFile) -> list[str]:
    """Return the names of the tensors that `stored_tensors` has no name for."""
    return [name for name in stored_tensors(file) if name in file.tensors]


def name_in_file(name: str, file: GGUFFile) -> str:
    """Return the name in the file of a checkpoint's tensor that is missing, for messages; its own where none is known.

    A file that has other experts' matrices apart would have this one apart, too.
    """
    names = names_of(file)
    owner, _, kind = name.rpartition(".")
    known = {one: stem for stem, one in names.outer.items()}
    if owner in known:
        return f"{known[owner]}.{kind}"
    block, _, rest = owner.removeprefix(f"{names.prefix}.").partition(".")
    for stem, one in names.layer.items():
        if one in (rest, f"{rest}.{kind}"):
            return f"blk.{block}.{stem}" if stem.endswith(f".{kind}") else f"blk.{block}.{stem}.{kind}"
    for stem, pattern in names.experts.items():
        if found := re.fullmatch(re.escape(pattern).replace(r"\{\}", r"(\d+)"), rest):
            apart = f"blk.{block}.{stem.removesuffix('_exps')}"
            is_apart = any(_ONE_EXPERT.fullmatch(_split(other)[1]) for other in file.tensors)
            return f"{apart}.{found[1]}.{kind}" if is_apart else f"blk.{block}.{stem}.{kind}"
    return name


def _part(number: int, parts: int, joined: np.ndarray) -> np.ndarray:
    """Return one of as many parts of a tensor's rows."""
    return np.split(joined, parts)[number]


def _made_of(name: str, names: Names, file: GGUFFile) -> dict[str, Stored]:
    """Return the checkpoint's tensors whose first part is this tensor of the file; empty if it is a later part.

    Raises:
        ValueError: a later part is missing.
    """
    block, stem, kind = _split(name)
    ending, whole = (f".{kind}", f"{stem}.{kind}") if kind else ("", stem)
    if block is None:
        known = names.outer.get(stem)
        return {f"{known}{ending}" if known else name: Stored((name,), names.undo.get(whole))}
    prefix = f"{names.prefix}.{block}"
    if stem.endswith("_exps") and names.fused is not None:
        return _fused(name, prefix, stem, kind, names, file)
    if stem in names.experts:
        return {
            f"{prefix}.{names.experts[stem].format(expert)}{ending}": Stored((name,), expert=expert)
            for expert in range(file.tensors[name].shape[0])
        }
    if (one := _ONE_EXPERT.fullmatch(stem)) and f"{one[1]}_exps" in names.experts:
        return {f"{prefix}.{names.experts[f'{one[1]}_exps'].format(int(one[2]))}{ending}": Stored((name,))}
    if whole in names.joined.values():
        return {}
    if stem in names.split:
        parts = names.split[stem]
        return {
            f"{prefix}.{part}{ending}": Stored((name,), partial(_part, number, len(parts)))
            for number, part in enumerate(parts)
        }
    others = tuple(f"blk.{block}.{other}" for other in [names.joined.get(whole)] if other is not None)
    for other in others:
        if other not in file.tensors:
            raise ValueError(f"{file.path} has tensor {name}, but there is no {other}")
    known = names.layer.get(whole) or (f"{names.layer[stem]}{ending}" if stem in names.layer else None)
    return {f"{prefix}.{known}" if known else name: Stored((name, *others), names.undo.get(whole))}


def _fused(name: str, prefix: str, stem: str, kind: str, names: Names, file: GGUFFile) -> dict[str, Stored]:
    ending = "_bias" if kind == "bias" else ""
    joined = {"ffn_down_exps": "down_proj", "ffn_gate_up_exps": "gate_up_proj"}
    if stem in joined:
        one = Stored((name,), fused=True, outputs_first=names.outputs_first)
        return {f"{prefix}.{names.fused}.{joined[stem]}{ending}": one}
    pair = tuple(name.replace(stem, f"ffn_{part}_exps") for part in ("gate", "up"))
    if not all(part in file.tensors for part in pair):
        return {name: Stored((name,))}
    if name != pair[0]:
        return {}
    gate_up = f"{prefix}.{names.fused}.gate_up_proj{ending}"
    made = Stored(pair, fused=True, alternating=names.alternating, outputs_first=names.outputs_first)
    return {gate_up: made}


def _split(name: str) -> tuple[str | None, str, str]:
    """Return a tensor's block (None outside of the layers), its stem, and its kind: weight, bias or empty."""
    block, rest = None, name
    if name.startswith("blk."):
        _, block, rest = name.split(".", 2)
    stem, _, kind = rest.rpartition(".")
    return (block, stem, kind) if kind in ("weight", "bias") and stem else (block, rest, "")
