"""Gives a running model new weights: tensors by Hugging Face name, from any array library, or a form of NNX's state.

NNX's forms are a module, a state, the result of `nnx.split`, and a state's plain dictionaries.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jpaged.execution.params import num_compact, to_float32
from jpaged.loading.parameters.targets import targets_of
from jpaged.loading.parameters.weights import abstract_params, read_params
from jpaged.loading.renamed_tensors import (
    VOCABULARY_HEAD,
    LanguageModelReader,
    is_multimodal,
    other_parts,
    refuse_other_head,
    separate_experts,
)
from jpaged.loading.tensor_reader import TensorReader
from jpaged.model_api import CausalLM
from pallas_kernels.held_matrix import is_held

LOCATION = "the state dict"


class StateDictReader:
    """Reads a mapping of arrays as a `TensorReader`; see there for the methods' contract.

    Args:
        tensors: arrays of NumPy, JAX or PyTorch, or objects with `__array__`, by name.

    Raises:
        ValueError: `tensors` is empty.
    """

    location = LOCATION
    quantised = False

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        if not tensors:
            raise ValueError(f"{LOCATION} is empty")
        self._tensors = tensors
        self.stored_dtype = _dtype(next(iter(tensors.values())))

    def names(self) -> Iterable[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def dtype(self, name: str) -> np.dtype:
        """Return the dtype of a tensor, without copying it to the host."""
        return _dtype(self._tensors[name])

    def read(self, name: str) -> np.ndarray:
        return _on_host(self._tensors[name])


def is_state_dict(new: Any) -> bool:
    """Tell whether weights come as a mapping of names to arrays rather than as the engine's own tree."""
    if not isinstance(new, Mapping) or isinstance(new, nnx.State):
        return False
    return all(isinstance(name, str) and hasattr(array, "shape") for name, array in new.items())


def params_of(
    tensors: Mapping[str, Any],
    model: CausalLM,
    old: nnx.State,
    mesh: Mesh,
    *,
    dtype: np.dtype,
    quantization: str | None,
    cast: bool,
) -> nnx.State:
    """Make a model's parameters from a state dict, as loading makes them from a checkpoint.

    Args:
        model: the model with shapes in place of arrays.
        old: the parameters that the new ones will replace; not changed. If it holds matrices in bfloat16 without
            conversion, and the state dict does not store all of these in bfloat16, all become float32.
        dtype: the engine's dtype.
        quantization: the engine's quantisation of matrices, see `EngineConfig`.
        cast: convert other floating dtypes to the engine's, and quantise matrices anew if the engine's are quantised.

    Raises:
        ValueError: a tensor is missing, of the wrong shape or, without `cast`, of another dtype; the state dict has a
            head that differs from the embedding, but the model's head is the embedding; or the engine's weights keep
            the codes of a quantised file, which a state dict cannot replace.
    """
    whole = separate_experts(StateDictReader(tensors), model)
    multimodal = is_multimodal(whole.names())
    reader: TensorReader = LanguageModelReader(whole, parts=other_parts(model)) if multimodal else whole
    used = {name for target in targets_of(model) for name in target.source.sources}
    if not _repeats_a_table(tensors):
        refuse_other_head(reader, used)
    held = any(is_held(leaf) and leaf.has_codes for leaf in jax.tree.leaves(old, is_leaf=is_held))
    if held and (quantization is None or quantization == "gguf"):
        raise ValueError(f"{LOCATION} cannot replace weights that were quantised in the file they came from")
    if held and not cast:
        raise ValueError(f"{LOCATION} is to be held with quantization={quantization!r}: give cast=True to quantise it")
    if not cast:
        for name in whole.names():
            if whole.dtype(name) != dtype and (multimodal or name in used):
                raise ValueError(f"{name} in {LOCATION} is {whole.dtype(name)}, the engine is {dtype}: give cast=True")
    structure: Any = jax.tree.structure(old)
    alike = False
    if num_compact(old):
        shapes = abstract_params(model, mesh, quantization=quantization, reader=reader, dtype_of=reader.dtype)
        alike = jax.tree.structure(shapes) == structure
    new = read_params(model, nnx.state(model), reader, mesh, quantization=quantization, may_be_compact=alike)
    return new if jax.tree.structure(new) == structure else to_float32(new)


def cast_like(new: Any, old: Any) -> Any:
    """Convert the floating arrays of a tree to the dtypes of another tree of the same structure; the rest stays.

    Trees of other structures are returned as they are.
    """
    structure: Any = jax.tree.structure(old)  # mypy finds no comparison in what jax calls a PyTreeDef
    if jax.tree.structure(new) != structure:
        return new
    return jax.tree.map(_cast, new, old)


def _repeats_a_table(tensors: Mapping[str, Any]) -> bool:
    """Tell whether the vocabulary's head shares another tensor's memory, as where PyTorch ties them. Comparing values
    would take long."""
    heads = [tensor for name, tensor in tensors.items() if name.endswith(VOCABULARY_HEAD)]
    if not heads:
        return False
    where = _memory(heads[0])
    return any(_memory(tensor) == where for name, tensor in tensors.items() if not name.endswith(VOCABULARY_HEAD))


def _memory(tensor: Any) -> int:
    return tensor.data_ptr() if hasattr(tensor, "data_ptr") else id(tensor)


def _cast(new: Any, old: Any) -> Any:
    floating = jax.numpy.issubdtype(new.dtype, np.floating) and jax.numpy.issubdtype(old.dtype, np.floating)
    return new.astype(old.dtype) if floating and new.dtype != old.dtype else new


def _dtype(array: Any) -> np.dtype:
    return np.dtype(jax.numpy.dtype(str(array.dtype).removeprefix("torch.")))


def _on_host(array: Any) -> np.ndarray:
    """Return a tensor on the host, in memory that the caller does not share: the caller's optimiser may write to its
    own."""
    if hasattr(array, "detach"):  # PyTorch's
        array = array.detach().cpu().contiguous()
        try:
            return array.numpy().copy()
        except TypeError:  # it gives NumPy no bfloat16
            return np.asarray(jax.dlpack.from_dlpack(array)).copy()
    found = np.asarray(array)
    return found.copy() if found.flags.writeable else found


def state_of(new: Any, old: Any) -> Any:
    """Return NNX's weights as a tree of the structure of `old`, with the same arrays; other mappings unchanged.

    Variables may have other classes or metadata than those of `old`, as a trainer's do. Arrays are not moved.

    Raises:
        ValueError: `new` is neither a form of NNX's weights nor a mapping.
    """
    if isinstance(new, tuple) and len(new) == 2 and isinstance(new[0], nnx.GraphDef):
        new = new[1]
    if isinstance(new, nnx.Module):
        new = nnx.state(new, nnx.Param)
    if not isinstance(new, nnx.State | Mapping):
        raise ValueError(
            f"new weights are of type {type(new).__name__}: give a tree like `params`, a module or state of NNX's, "
            "(graphdef, state) of `nnx.split`, or a mapping of tensors by their names"
        )
    if not isinstance(new, nnx.State) and not _is_nested(new):
        return new
    structure: Any = jax.tree.structure(old)  # mypy finds no comparison in what jax calls a PyTreeDef
    if jax.tree.structure(new) == structure:
        return new
    given, wanted = _by_path(new), _by_path(old)
    if given.keys() != wanted.keys():
        return new  # the error that names missing parameters is raised when it is placed
    return jax.tree.unflatten(structure, [given[path] for path in wanted])


def _is_nested(new: Any) -> bool:
    return isinstance(new, Mapping) and bool(new) and all(isinstance(value, Mapping) for value in new.values())


def _by_path(tree: Any) -> dict[str, Any]:
    """Return leaves by path, in the tree's order; a variable and its value have one path."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path).replace(".value", ""): leaf for path, leaf in leaves}
