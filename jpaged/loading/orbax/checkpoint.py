"""Saves and loads checkpoints in Orbax format, with parameters in the model's own layout, so loading converts nothing.

A checkpoint is a folder: `params` (Orbax, one array per layer whether or not the model stacked them), config.json,
the tokenizer's files, generation_config.json, and jpaged.json, written last, which describes the others.
Each device's part of an array is a raw file, which is read without Orbax (`ZarrArray`): a CPU device uses the pages
of the file as its memory, so nothing is copied.
Parameters are laid out for one number of tensor shards. A mesh with the same number loads them directly into its
shards; any other loads them through `OrbaxWeights`, which undoes the layout on the host.
"""

from __future__ import annotations

import json
import math
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jpaged.loading.generation_config import GENERATION_CONFIG, file_fields
from jpaged.loading.hugging_face import without_lines
from jpaged.loading.model_config import write_config
from jpaged.loading.orbax.zarr_array import ZarrArray
from jpaged.loading.parameters.placement import HostValue, place_all
from jpaged.loading.parameters.targets import (
    Target,
    abstract_model,
    compact_paths,
    fill,
    flat_values,
    in_formats,
    targets_of,
    without_rounded,
)
from jpaged.loading.parameters.weights import warn_of_unused
from jpaged.loading.pooling_head import saved_fields
from jpaged.loading.source import CHECKPOINT_MARKER
from jpaged.loading.tokenizer import as_transformers
from jpaged.loading.weight_formats.stored_codes import widened
from jpaged.loading.weight_formats.weight_format import NAMED_CODECS, StatePath, WeightFormat, WeightFormats, joined
from jpaged.model_api import BuildContext, CausalLM, HostArray
from jpaged.new_folder import new_folder
from pallas_kernels.held_matrix import PermutedMatrix, is_held
from pallas_kernels.quantised import QuantisedMatrix

if TYPE_CHECKING:
    from jpaged.loading.loaded_model import LoadedModel

_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
"""Files with the settings of image preprocessing."""
FORMAT = 5
QUANTISED_FORMAT = 6
"""Format of a checkpoint with parameters in parts: codes, scales and minimums."""
ORDERED_FORMAT = 7
"""Like `QUANTISED_FORMAT`, with parameters whose inputs are sorted; the order is a further part."""
NAMED_FORMAT = 8
"""Like `ORDERED_FORMAT`, with codes of `NAMED_CODECS`."""
LAYERS_FORMAT = 9
"""Like `NAMED_FORMAT`, where layers differ in the formats of a parameter, which are listed for each."""
_FORMATS_BEFORE_LINEAR = (3, 4)
"""`FORMAT` and `QUANTISED_FORMAT` of older versions, which named a matrix and its bias as two parameters of a layer."""


def save_checkpoint(path: str | Path, loaded: LoadedModel) -> None:
    """Write a model as an Orbax checkpoint; ``dataclasses.replace(loaded, params=...)`` saves trained parameters.

    A single process writes to a temporary folder next to `path` and renames it at the end, so an exception or Ctrl-C
    leaves nothing. Several processes must all call this, with the same path on a shared file system; they write to
    `path` directly.

    Raises:
        FileExistsError: the path exists.
        ValueError: the model has a head for classes or Dense modules, which the format cannot store.
    """
    path = Path(path).absolute()
    if path.exists():
        raise FileExistsError(f"path={str(path)!r} exists; a checkpoint is written to a new folder")
    if loaded.pooling.dense is not None:
        raise ValueError(f"{loaded.name} has Dense modules (modules.json), which a saved checkpoint has no place for")
    if loaded.pooling.classes is not None and loaded.pooling.answers is None:
        raise ValueError(f"{loaded.name} is a model for classification, whose head a saved checkpoint has no place for")
    if jax.process_count() > 1:
        _write(path, loaded)
        return
    with new_folder(path) as folder:
        _write(folder, loaded)


def _write(path: Path, loaded: LoadedModel) -> None:
    """Write a checkpoint's files to a folder."""
    import orbax.checkpoint as ocp

    values = flat_values(loaded.params)
    params: dict[str, Any] = {}
    formats: dict[str, dict[str, WeightFormat]] = {}
    for target in targets_of(loaded.model):
        value = values[target.path]
        value = jax.tree.map(partial(_single, index=target.index), value)
        if is_held(value):
            value = value.as_saved(target.dtype)
        if is_held(value):
            assert isinstance(value, QuantisedMatrix | PermutedMatrix)
            formats.setdefault(_name(target), {})[_key(target)] = WeightFormat.of(value)
        params |= _parts(target, value)
    # Raw files. Weights hardly compress, and decompressing takes longer than reading from a disk.
    handler = ocp.PyTreeCheckpointHandler(use_compression=False, use_ocdbt=False)
    # Orbax warns that there is nothing to merge, which is always so without OCDBT.
    with without_lines("absl", "Skipping merge of OCDBT"), ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(path / "params", args=ocp.args.PyTreeSave(params))
    if jax.process_index() == 0:
        write_config(loaded.config, path)
        if loaded.tokenizer is not None:
            as_transformers(loaded.tokenizer).save_pretrained(path)
        for name in _PROCESSOR_FILES:
            if (file := Path(loaded.processor or loaded.location) / name).is_file():
                shutil.copy(file, path / name)
        generation = file_fields(loaded.eos_token_ids, loaded.sampling)
        (path / GENERATION_CONFIG).write_text(json.dumps(generation))
        about = {
            "format": _format_number(formats.values()),
            "forms": {name: form.as_json() for name, form in _named_forms(formats).items()},
            "dtype": str(loaded.dtype),
            "tensor_parallel": loaded.tensor_parallel_size,
            "expert_parallel": loaded.expert_parallel,
            "column_unit": loaded.column_unit,
            "tensor_shapes": loaded.tensor_shapes,
            "pooling": saved_fields(loaded.pooling),
        }
        (path / CHECKPOINT_MARKER).write_text(json.dumps(about))


def _named_forms(formats: Mapping[str, Mapping[str, WeightFormat]]) -> dict[str, WeightFormat]:
    """Return formats by the names of parameters, of all layers at once where they are alike, or else by their keys."""
    named: dict[str, WeightFormat] = {}
    for name, of_layers in formats.items():
        alike = len(set(of_layers.values())) == 1
        named |= {name: next(iter(of_layers.values()))} if alike else of_layers
    return named


def _format_number(formats: Iterable[Mapping[str, WeightFormat]]) -> int:
    """Return the oldest format that can store these, so that older versions can read as much as possible.

    Args:
        formats: of each parameter, by layer.
    """
    sets = [set(of_layers.values()) for of_layers in formats]
    if any(len(of_layers) > 1 for of_layers in sets):
        return LAYERS_FORMAT
    held = [form for (form,) in sets]
    if any(form.codec in NAMED_CODECS for form in held):
        return NAMED_FORMAT
    if any(form.ordered for form in held):
        return ORDERED_FORMAT
    return QUANTISED_FORMAT if held else FORMAT


class OrbaxWeights:
    """Reads a checkpoint as a `TensorReader` of the Hugging Face tensors from which its parameters were made.

    Args:
        model_cls: the family that `config` belongs to.

    Raises:
        ValueError: the checkpoint was written by a version of jpaged with another format.
    """

    quantised = False

    def __init__(self, folder: Path, model_cls: type[Any], config: Any):
        about = json.loads((folder / CHECKPOINT_MARKER).read_text())
        known = (*_FORMATS_BEFORE_LINEAR, FORMAT, QUANTISED_FORMAT, ORDERED_FORMAT, NAMED_FORMAT, LAYERS_FORMAT)
        if about["format"] not in known:
            raise ValueError(
                f"{folder} has checkpoint format {about['format']}; this version reads {', '.join(map(str, known))}"
            )
        self._old = about["format"] in _FORMATS_BEFORE_LINEAR
        last = ".weight" if self._old else ""
        self._forms = {name + last: WeightFormat.from_json(said) for name, said in about.get("forms", {}).items()}
        self.location = str(folder)
        self.tensor_parallel: int = about["tensor_parallel"]
        self.expert_parallel: bool = about.get("expert_parallel", False)
        self.column_unit: int = about.get("column_unit", 1)
        self.stored_dtype = np.dtype(jnp.dtype(about["dtype"]))
        self._shapes = {name: tuple(shape) for name, shape in about["tensor_shapes"].items()}
        self._model_cls, self._config = model_cls, config
        self._makers: dict[str, Target] | None = None
        self._last: tuple[Target, dict[str, np.ndarray]] | None = None
        self._lock = threading.Lock()

    def fits(self, tensor_parallel: int, expert_parallel: bool) -> bool:
        """Tell whether the parameters are laid out for these shards; with one shard, `expert_parallel` makes no
        difference."""
        alike = tensor_parallel == 1 or expert_parallel == self.expert_parallel
        return alike and tensor_parallel == self.tensor_parallel

    def has_layout_of(self, model_cls: type[Any], config: Any, build: BuildContext) -> bool:
        """Tell whether the parameters have the shapes that a model has which is built so."""
        if not self.fits(build.tensor_parallel, build.expert_parallel):
            return False
        if self.column_unit == build.column_unit:
            return True
        both = build, replace(build, column_unit=self.column_unit)
        ours, saved = ([target.shape for target in targets_of(abstract_model(model_cls, config, one))] for one in both)
        return ours == saved

    def check_held(self, tensor_parallel: int, expert_parallel: bool, quantization: str | None) -> None:
        """Raise ValueError if a quantised checkpoint is to be loaded with other settings than it was saved with."""
        if not self.has_codes:
            return
        if quantization is not None:
            raise ValueError(f"quantization={quantization!r}: {self.location} is quantised already; leave it None")
        if not self.fits(tensor_parallel, expert_parallel):
            raise ValueError(
                f"{self.location} is quantised for tensor_parallel_size={self.tensor_parallel} with expert_parallel="
                f"{self.expert_parallel}, not {tensor_parallel} with {expert_parallel}: load its source with "
                "quantization= instead"
            )

    @property
    def has_codes(self) -> bool:
        """Tell whether parameters are held as codes."""
        return bool(self._forms)

    def formats_of(self, targets: Iterable[Target]) -> WeightFormats:
        """Return the formats of a model's parameters: as they are saved, or one that holds all layers of a stack.

        A stack that none holds is left out: it becomes floats.
        """
        found: dict[StatePath, list[WeightFormat | None]] = {}
        for target in targets:
            found.setdefault(target.path, []).append(self._form(target))
        coded = {
            path: [form for form in forms if form is not None] for path, forms in found.items() if None not in forms
        }
        return {path: wide for path, forms in coded.items() if (wide := joined(forms)) is not None}

    def _form(self, target: Target) -> WeightFormat | None:
        return self._forms.get(_key(target), self._forms.get(_name(target)))

    def names(self) -> Iterable[str]:
        return self._shapes.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def dtype(self, name: str) -> np.dtype:
        if name not in self._shapes:
            raise KeyError(name)
        return self.stored_dtype

    def read(self, name: str) -> np.ndarray:
        shape = self._shapes[name]
        with self._lock:
            target = self._maker_of(name)
            if self._last is None or self._last[0] is not target:
                sources = target.source.sources
                array = self.parameter(target)
                assert not is_held(array)
                tensors = unconvert(target.source.convert, [self._shapes[s] for s in sources], np.asarray(array))
                self._last = target, dict(zip(sources, tensors, strict=True))
            tensor = self._last[1][name]
        assert tensor.shape == shape
        return tensor

    def parameter(self, target: Target) -> HostValue:
        """Return the saved value of a target; slicing reads it.

        Raises:
            ValueError: the saved value has another shape, or is missing.
        """

        key = _old_key(target) if self._old else _key(target)

        def saved(part: str = "") -> Any:
            return ZarrArray(Path(self.location) / "params" / f"{key}{part}")

        form, axis = self._form(target), target.source.contracted
        if form is None:
            found = saved()
        else:
            assert axis is not None
            minimums = saved(".minimums") if form.minimums else None
            found = QuantisedMatrix(saved(".codes"), saved(".scales"), minimums, axis, form.codec, form.rounds_rows)
            if form.ordered:
                found = PermutedMatrix(saved(".order"), found)
            if target.form is None:
                found = np.asarray(jax.tree.map(np.asarray, found).dequantised(target.dtype))
            elif target.form != form:
                found = widened(jax.tree.map(np.asarray, found), target.form)
        if found.shape != target.shape:
            raise ValueError(f"parameter {target.name} has shape {target.shape}, but {self.location} has {found.shape}")
        return found

    def _maker_of(self, name: str) -> Target:
        """Return the saved parameter that holds a tensor's values."""
        if self._makers is None:
            build = BuildContext(
                dtype=self.stored_dtype,
                tensor_parallel=self.tensor_parallel,
                expert_parallel=self.expert_parallel,
                column_unit=self.column_unit,
            )
            saved = abstract_model(self._model_cls, self._config, build)
            self._makers = {source: target for target in targets_of(saved) for source in target.source.sources}
        return self._makers[name]


def restore_params(
    model_cls: type[Any],
    config: Any,
    reader: OrbaxWeights,
    build: BuildContext,
    *,
    mesh: jax.sharding.Mesh,
) -> tuple[CausalLM, nnx.GraphDef, nnx.State]:
    """Load parameters from a checkpoint of the same number of shards; like `load_params`, but each device reads its own
    part.

    Raises:
        ValueError: the checkpoint has another layout, see `OrbaxWeights.fits`.
    """
    if not reader.fits(build.tensor_parallel, build.expert_parallel):
        raise ValueError(
            f"{reader.location} is laid out for tensor_parallel={reader.tensor_parallel}, expert_parallel="
            f"{reader.expert_parallel}, not {build.tensor_parallel}, {build.expert_parallel}"
        )
    model = abstract_model(model_cls, config, build)
    graphdef, abstract = nnx.split(model)
    targets = targets_of(model)
    compact = compact_paths(targets, reader.dtype)
    values = without_rounded(
        compact, lambda paths: place_all(in_formats(targets, reader.formats_of(targets), paths), reader.parameter, mesh)
    )
    warn_of_unused(reader, targets)
    return model, graphdef, fill(abstract, values)


def _single(value: jax.Array, index: int | None) -> jax.Array | np.ndarray:
    """Return a parameter, or one layer of a stack. The layer is copied to the host if possible, as devices may not have
    room for it and the stack."""
    if index is None:
        return value
    return np.asarray(value[index]) if value.is_fully_addressable else value[index]


def _name(target: Target) -> str:
    """Return a parameter's name without the layer's number."""
    return ".".join(target.source.path)


def _key(target: Target) -> str:
    """Return a target's name in a checkpoint: it contains the layer number, so stacking does not change it."""
    layer = target.source.layer
    return _name(target) if layer is None else f"layers.{layer}.{_name(target)}"


def _parts(target: Target, value: Any) -> dict[str, Any]:
    """Return a target's arrays by their names in a checkpoint."""
    if not is_held(value):
        return {_key(target): value}
    return {f"{_key(target)}.{name}": part for name, part in value.parts().items()}


def _old_key(target: Target) -> str:
    """Return a target's name in a checkpoint of `_FORMATS_BEFORE_LINEAR`, in which only norms had parts."""
    owner, _, name = _key(target).rpartition(".")
    if name == "weight":
        return owner
    return f"{owner}_bias" if name == "bias" and not owner.endswith("norm") else f"{owner}.{name}"


def unconvert(
    convert: Callable[..., HostArray], shapes: Sequence[tuple[int, ...]], parameter: np.ndarray
) -> list[np.ndarray]:
    """Return the tensors, of these shapes, from which `convert` makes this parameter.

    Converters move, repeat and zero-pad values (`HeadLayout`, fused and transposed projections). Converting running
    numbers shows where each value goes, so no family has to write an inverse of its converters.

    Raises:
        ValueError: `convert` does anything else with the values.
    """
    ends = list(accumulate(map(math.prod, shapes), initial=0))
    count = ends[-1]

    def split(flat: np.ndarray) -> list[np.ndarray]:
        return [flat[a:b].reshape(shape) for (a, b), shape in zip(pairwise(ends), shapes, strict=True)]

    number = np.int32 if count < np.iinfo(np.int32).max else np.int64
    origins = np.asarray(convert(*split(np.arange(1, count + 1, dtype=number))))
    if origins.shape != parameter.shape or not np.issubdtype(origins.dtype, np.integer):
        raise ValueError(f"conversion gives {origins.dtype} {origins.shape} for {parameter.shape}")
    if origins.min() >= 0 and origins.max() <= count:
        reached = np.zeros(count + 1, bool)
        reached[origins] = True
        flat = np.empty(count + 1, parameter.dtype)
        flat[origins] = parameter
        tensors = split(flat[1:])
        if reached[1:].all() and np.array_equal(_bits(np.asarray(convert(*tensors))), _bits(parameter)):
            return tensors
    raise ValueError("conversion does more than move, repeat and pad values")


def _bits(array: np.ndarray) -> np.ndarray:
    """Return an array's bytes, so that NaN equals itself."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
