"""Writes a model's matrices as codes, in folders that other engines read too: compressed-tensors, AWQ and GPTQ.

Codes are rounded to nearest. A group's scale is the one of several that makes the squared error of its values least: it
may cut the largest values off where that brings the others closer. No calibration texts are used.

A folder is written tensor by tensor, in shards, to a temporary name, and gets its name at the end.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
from jax.sharding import Mesh

from jpaged.loading.build_context import build_context
from jpaged.loading.generation_config import GENERATION_CONFIG, file_fields, read_generation_config
from jpaged.loading.hugging_face import module_folders, transformers
from jpaged.loading.open_checkpoint import OpenedModel, open_model
from jpaged.loading.parameters.targets import abstract_model, targets_of
from jpaged.loading.pooling_head import HeadlessReader
from jpaged.loading.registry import is_encoder
from jpaged.loading.renamed_tensors import LanguageModelReader, RenamedTensors
from jpaged.loading.safetensors_reader import SafetensorsWeights
from jpaged.loading.tensor_reader import TensorReader
from jpaged.loading.tokenizer import as_transformers, has_tokenizer, load_tokenizer
from jpaged.loading.weight_formats.stored_codes import pack_words
from jpaged.loading.written_forms import GROUPS, check_form
from jpaged.model_api import TENSOR_AXIS, ModelConfig
from jpaged.new_folder import new_folder

_warn = logging.getLogger(__name__).warning
_COPIED = ("*.json", "*.jinja", "*.txt", "*.model")
_NOT_COPIED = ("config.json", "model.safetensors.index.json", "hf_quant_config.json")
_SHARD_BYTES = 2 << 30
_CHUNK_BYTES = 32 << 20
"""Bytes of float32 rounded at a time."""
_SHRINK = np.linspace(1, 0.7, 13, dtype=np.float32)
"""Parts of a group's range that are tried."""
_AWQ_PLACES = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output whose code lies in each place of AWQ's words."""


class Codes(NamedTuple):
    """Holds a matrix as numbers: a value is ``(code - zero) * scale``.

    Attributes:
        codes: uint8 [outputs, inputs].
        zeros: uint8 [outputs, groups].
        scales: [outputs, groups], in a dtype that the file stores.
    """

    codes: np.ndarray
    zeros: np.ndarray
    scales: np.ndarray


class Written(NamedTuple):
    """Says what a folder of quantised weights holds.

    Attributes:
        quantised: matrices that are written as codes.
        plain: names of matrices that a layer multiplies with and that stay plain, since their sizes do not fit.
        fitting: the largest group size that fits them too, if any.
    """

    quantised: int
    plain: list[str]
    fitting: int | None


def quantise_folder(
    name: str | Path,
    out: str | Path,
    *,
    method: str = "compressed-tensors",
    bits: int = 4,
    group_size: int = 128,
    warn: Callable[[str], None] = _warn,
) -> Written:
    """Write a model with plain weights, or a GGUF file, as a folder of quantised safetensors.

    The head, embeddings, routers and norms stay plain, as do towers and their projectors, matrices that are stored
    inputs first (GPT-2's), and those whose inputs are no multiple of `group_size` or whose outputs are none of 8; the
    result names these last ones. compressed-tensors and GPTQ are symmetric, AWQ has zero points.

    Args:
        method: one of `written_forms.WRITTEN`.
        bits: 4, or 8 except for AWQ.
        group_size: neighbouring inputs that share a scale: 32, 64 or 128.
        warn: is called, before anything is written, if the result will be larger than the model.

    Raises:
        ValueError: a setting is not written, no matrix fits, or the model is quantised already.
        FileExistsError: `out` exists.
    """
    check_form(method, bits, group_size)
    target = Path(out).absolute()
    if target.exists():
        raise FileExistsError(f"out={str(out)!r} exists; a model is written to a new folder")
    opened = open_model(name)
    if opened.source.kind == "orbax" or (opened.reader.quantised and opened.gguf is None):
        raise ValueError(f"model={str(name)!r} is no plain checkpoint: name the one that it was made of")
    if hasattr(opened.config, "vision_config") and not isinstance(opened.reader, LanguageModelReader):
        raise ValueError(f"model={str(name)!r} stores its head in the place of its embedding; save it with both")
    matrices = _matrices(opened)
    before, after = _sizes(opened, matrices, method, bits, group_size)
    if after > before:
        warn(
            f"warning: the result is larger than {opened.source.name}, {after / 1e6:.1f} MB of tensors against "
            f"{before / 1e6:.1f}, as all but the quantised matrices is written as floats; fewer bits, or the plain "
            "checkpoint that the model was made of, help"
        )
    with new_folder(target) as folder:
        return _write(opened, matrices, folder, method, bits, group_size)


def _write(opened: OpenedModel, matrices: set[str], folder: Path, method: str, bits: int, group: int) -> Written:
    shards, plain, unfit = _Shards(folder), [], {}
    quantised = 0
    for stored, name, reader in _tensors(opened):
        tensor = np.asarray(reader.read(name))
        owner = stored.removesuffix(".weight")
        if reader is not opened.reader or name not in matrices:
            shards.add({stored: tensor})
            is_table = reader is opened.reader and "embed" in name
            if tensor.ndim == 2 and stored.endswith(".weight") and not is_table:
                plain.append(owner)
            continue
        if not _fit([tensor.shape], group):
            unfit[stored] = tensor.shape
            shards.add({stored: tensor})
            plain.append(owner)
            continue
        narrow = tensor.dtype if tensor.dtype in (np.float16, ml_dtypes.bfloat16) else np.dtype(np.float16)
        codes = nearest_codes(tensor, bits, group, narrow, symmetric=method != "awq")
        shards.add({f"{owner}.{part}": array for part, array in _STORED[method](codes, bits).items()})
        quantised += 1
    fitting = max((size for size in GROUPS if _fit(unfit.values(), size)), default=None)
    if not quantised and not unfit:
        model = f"model={opened.source.name!r} ({opened.family.__name__})"
        raise ValueError(
            f"{model} has no matrix that can be written quantised: tables, routers, norms and matrices that are stored "
            "inputs first stay plain"
        )
    if not quantised:
        remedy = f"; {fitting} takes all" if fitting else ""
        raise ValueError(f"group_size={group}: none of {len(unfit)} matrices fits{remedy}")
    shards.finish()
    said = opened.config.given if isinstance(opened.config, ModelConfig) else opened.config.to_dict()
    if isinstance(opened.reader, HeadlessReader):
        said = said | {"tie_word_embeddings": opened.reader.tied}
    if opened.gguf is not None and (architecture := _architecture(opened)):
        said = said | {"architectures": [architecture]}
    config = said | {"quantization_config": _described(method, bits, group, plain)}
    (folder / "config.json").write_text(json.dumps(config, indent=2, default=str))
    if opened.source.path.is_dir():
        for pattern in _COPIED:
            for file in opened.source.path.glob(pattern):
                if file.name not in _NOT_COPIED:
                    shutil.copy(file, folder / file.name)
        for name in (*module_folders(opened.source.path), "additional_chat_templates"):
            if (opened.source.path / name).is_dir():
                shutil.copytree(opened.source.path / name, folder / name)
    elif has_tokenizer(opened.source):
        tokenizer = load_tokenizer(opened.source, opened.gguf)
        as_transformers(tokenizer).save_pretrained(folder)
        generation = read_generation_config("auto", opened.source, opened.gguf, tokenizer)
        if generation.eos_token_ids:  # config.json has but one of them
            fields = file_fields(generation.eos_token_ids, generation.sampling)
            (folder / GENERATION_CONFIG).write_text(json.dumps(fields))
    for file in folder.glob("*.safetensors"):  # the library makes files that only their owner reads
        shutil.copymode(folder / "config.json", file)
    return Written(quantised, list(unfit), fitting)


def _architecture(opened: OpenedModel) -> str | None:
    """Return the name of transformers' class of a model, by which other engines know it; None if it has none."""
    kind = opened.config.model_type
    if kind not in (configs := transformers().CONFIG_MAPPING):
        return None
    name = configs[kind].__name__.removesuffix("Config")
    if is_encoder(opened.family, opened.config):
        return f"{name}Model"
    return f"{name}LMHeadModel" if kind == "gpt2" else f"{name.removesuffix('Text')}ForCausalLM"


def _sizes(opened: OpenedModel, matrices: set[str], method: str, bits: int, group: int) -> tuple[int, int]:
    """Return the bytes of a model's tensors before and after, without reading them."""
    before = after = 0
    for _, name, reader in _tensors(opened):
        shape = reader.shape(name)
        size = math.prod(shape) * reader.dtype(name).itemsize
        before += size
        if reader is not opened.reader or name not in matrices or not _fit([shape], group):
            after += size
            continue
        (outputs, inputs), groups = shape, math.prod(shape) // group
        zeros, order = groups * bits // 8 * (method != "compressed-tensors"), 4 * inputs * (method == "gptq")
        after += outputs * inputs * bits // 8 + 2 * groups + zeros + order + 16 * (method == "compressed-tensors")
    return (before if opened.gguf is None else opened.gguf.num_bytes), after


def _tensors(opened: OpenedModel) -> Iterator[tuple[str, str, TensorReader]]:
    """Yield each tensor that is written: its name in the folder, and its name in a reader, which is the model's for
    what the model reads, and that of the whole checkpoint for a tower or a head for classes."""
    reader = opened.reader
    is_part = isinstance(reader, LanguageModelReader) and not hasattr(opened.config, "vision_config")
    if is_part or not isinstance(reader, RenamedTensors):
        yield from ((name, name, reader) for name in reader.names() if _is_weight(reader, name))
        return
    yield from ((reader.written_name(name), name, reader) for name in reader.names() if _is_weight(reader, name))
    yield from ((name, name, reader.whole) for name in reader.others if _is_weight(reader.whole, name))


def _is_weight(reader: TensorReader, name: str) -> bool:
    """Tell whether a tensor holds floats: others, such as masks and positions, engines make themselves."""
    if isinstance(reader, RenamedTensors):
        return _is_weight(reader.whole, reader.stored_name(name))
    return not isinstance(reader, SafetensorsWeights) or reader.is_float(name)


def _fit(shapes: Iterable[tuple[int, ...]], group: int) -> bool:
    return all(len(shape) == 2 and shape[1] % group == 0 and shape[0] % 8 == 0 for shape in shapes)


def _matrices(opened: OpenedModel) -> set[str]:
    """Return the names of the tensors that a model multiplies with and may hold quantised, without its tables."""
    mesh = Mesh(np.array(jax.devices()[:1]), (TENSOR_AXIS,))
    build = build_context(mesh, np.float32, stacked=False, computes=False)
    targets = targets_of(abstract_model(opened.family, opened.config, build))
    sources = [target.source for target in targets if target.source.contracted == -2]
    return {name for source in sources if not source.inputs_first for name in source.sources}


def nearest_codes(matrix: np.ndarray, bits: int, group: int, dtype: np.dtype, *, symmetric: bool) -> Codes:
    """Round a matrix [outputs, inputs] to codes, with the scales that make the squared error least.

    Args:
        dtype: of the scales, to which they are rounded before values are.
        symmetric: whether zero points are in the middle.
    """
    outputs, inputs = matrix.shape
    most, rows = 2**bits - 1, max(1, _CHUNK_BYTES // (4 * inputs))
    parts = [_nearest(matrix[start : start + rows], most, group, dtype, symmetric) for start in range(0, outputs, rows)]
    return Codes(*(np.concatenate(part) for part in zip(*parts, strict=True)))


def _nearest(matrix: np.ndarray, most: int, group: int, dtype: np.dtype, symmetric: bool) -> Codes:
    groups = np.asarray(matrix, np.float32).reshape(len(matrix), -1, group)
    low, high = np.minimum(groups.min(-1), 0), np.maximum(groups.max(-1), 0)
    best = np.full(low.shape, np.inf, np.float32)
    scales, zeros = np.ones(low.shape, dtype), np.zeros(low.shape, np.float32)
    for part in _SHRINK:
        wide = (np.maximum(-low, high) * 2 if symmetric else high - low) * part / most
        held = np.where(wide == 0, 1, np.maximum(wide, ml_dtypes.finfo(dtype).smallest_normal)).astype(dtype)
        middle = np.full(low.shape, (most + 1) // 2, np.float32)
        zero = middle if symmetric else np.clip(np.rint(-low * part / held.astype(np.float32)), 0, most)
        error = np.square(_values(groups, held, zero, most) - groups).sum(-1)
        better = error < best
        best, scales = np.where(better, error, best), np.where(better, held, scales)
        zeros = np.where(better, zero, zeros)
    codes = _codes(groups, scales, zeros, most).reshape(matrix.shape)
    return Codes(codes.astype(np.uint8), zeros.astype(np.uint8), scales)


def _codes(groups: np.ndarray, scales: np.ndarray, zeros: np.ndarray, most: int) -> np.ndarray:
    scaled = groups / scales.astype(np.float32)[..., None]
    return np.clip(np.rint(scaled) + zeros[..., None], 0, most)


def _values(groups: np.ndarray, scales: np.ndarray, zeros: np.ndarray, most: int) -> np.ndarray:
    steps = _codes(groups, scales, zeros, most) - zeros[..., None]
    values: np.ndarray = steps * scales.astype(np.float32)[..., None]
    return values


# ------------------------------------------------------------------ the three forms


def _as_packed(codes: Codes, bits: int) -> dict[str, np.ndarray]:
    """Return the tensors of compressed-tensors' ``pack-quantized``."""
    return {
        "weight_packed": pack_words(codes.codes, bits, axis=1),
        "weight_scale": codes.scales,
        "weight_shape": np.array(codes.codes.shape, np.int64),
    }


def _as_awq(codes: Codes, bits: int) -> dict[str, np.ndarray]:
    """Return the tensors of AWQ's ``gemm``."""
    return {
        "qweight": pack_words(codes.codes.T, bits, axis=1, order=_AWQ_PLACES),
        "qzeros": pack_words(codes.zeros.T, bits, axis=1, order=_AWQ_PLACES),
        "scales": codes.scales.T,
    }


def _as_gptq(codes: Codes, bits: int) -> dict[str, np.ndarray]:
    """Return the tensors of GPTQ's first version, which stores zero points minus one."""
    inputs = codes.codes.shape[1]
    size = inputs // codes.scales.shape[1]
    return {
        "qweight": pack_words(codes.codes.T, bits, axis=0),
        "qzeros": pack_words(codes.zeros.T - np.uint8(1), bits, axis=1),
        "scales": codes.scales.T,
        "g_idx": (np.arange(inputs) // size).astype(np.int32),
    }


_STORED: dict[str, Callable[[Codes, int], dict[str, np.ndarray]]] = {
    "compressed-tensors": _as_packed,
    "awq": _as_awq,
    "gptq": _as_gptq,
}


def _described(method: str, bits: int, group: int, plain: list[str]) -> dict[str, Any]:
    """Return the config's ``quantization_config``.

    Args:
        plain: modules whose matrices are not quantised.
    """
    if method == "awq":
        settings = {"bits": bits, "group_size": group, "zero_point": True, "version": "gemm"}
        return {"quant_method": "awq", **settings, "modules_to_not_convert": plain}
    if method == "gptq":
        settings = {"bits": bits, "group_size": group, "sym": True, "desc_act": False, "checkpoint_format": "gptq"}
        return {"quant_method": "gptq", **settings, "dynamic": {f"-:^{name}$": {} for name in plain}}
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group", "group_size": group}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    settings = {"format": "pack-quantized", "quantization_status": "compressed", "ignore": plain}
    return {"quant_method": "compressed-tensors", **settings, "config_groups": groups}


class _Shards:
    """Writes tensors to files of at most `_SHARD_BYTES`, or of one larger tensor, with an index."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._held: dict[str, np.ndarray] = {}
        self._names: list[list[str]] = []
        self._bytes = self._total = 0

    def add(self, tensors: dict[str, np.ndarray]) -> None:
        size = sum(tensor.nbytes for tensor in tensors.values())
        if self._held and self._bytes + size > _SHARD_BYTES:
            self._flush()
        self._held |= {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
        self._bytes += size
        self._total += size

    def finish(self) -> None:
        self._flush()
        count = len(self._names)
        shard_of: dict[str, str] = {}
        for number, names in enumerate(self._names, start=1):
            file = f"model-{number:05}-of-{count:05}.safetensors" if count > 1 else "model.safetensors"
            (self._folder / f"{number}.part").rename(self._folder / file)
            shard_of |= dict.fromkeys(names, file)
        if count > 1:
            index = {"metadata": {"total_size": self._total}, "weight_map": shard_of}
            (self._folder / "model.safetensors.index.json").write_text(json.dumps(index))

    def _flush(self) -> None:
        from safetensors import SafetensorError
        from safetensors.numpy import save_file

        self._names.append(list(self._held))
        try:
            save_file(self._held, self._folder / f"{len(self._names)}.part", {"format": "pt"})
        except SafetensorError as error:  # as on a full disk
            raise OSError(f"{self._folder} cannot be written: {error}") from error
        self._held, self._bytes = {}, 0
