"""Loads the head that drafts from a model's hidden states, of the model's checkpoint or a folder of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from flax import nnx

from jpaged.loading.build_context import CompactTiles, build_context
from jpaged.loading.loaded_model import LoadedModel
from jpaged.loading.open_checkpoint import OpenedModel, open_model
from jpaged.loading.orbax.checkpoint import OrbaxWeights
from jpaged.loading.parameters.targets import Target, abstract_model, flat_values, targets_of
from jpaged.loading.parameters.weights import read_params
from jpaged.loading.renamed_tensors import RenamedTensors, same_numbers
from jpaged.loading.safetensors_reader import SafetensorsWeights
from jpaged.loading.tensor_reader import TensorReader
from jpaged.model_api import (
    AttentionGroup,
    DraftHead,
    HasDraftHead,
    HasHeadBias,
    HostArray,
    ScalesEmbedding,
    Tappable,
    WeightSource,
)
from pallas_kernels.large_pages import use_large_pages


@dataclass(frozen=True)
class LoadedHead:
    """Holds a head in memory.

    Attributes:
        head: the head with shapes in place of arrays.
        graphdef: the head without its weights.
        params: its own weights, on the model's mesh, without the model's tables.
        tables: those of `DraftHead.tables` that are the model's, and "head_bias" where they bring one.
        taps: see `DraftHead.taps`.
    """

    head: DraftHead
    graphdef: nnx.GraphDef
    params: nnx.State
    tables: tuple[str, ...]
    taps: tuple[int, ...]


def load_draft_head(
    loaded: LoadedModel,
    folder: str | Path | None = None,
    *,
    revision: str | None,
    download_dir: str | Path | None,
    language_model_only: bool,
    quantization: str | None,
    compact_tiles: CompactTiles | None,
    check: Callable[[DraftHead], None] = lambda head: None,
) -> LoadedHead:
    """Load the head that a model's checkpoint holds besides the model, or a folder alone.

    Args:
        folder: alias, hub id or folder of the head; None = the model's own.
        revision, download_dir, language_model_only, quantization, compact_tiles: those that the model, or the folder,
            is loaded with, see `load_model`.
        check: raises ValueError for a head that is not the wanted one, before its weights are read.

    Raises:
        ValueError: the family or the checkpoint has no head, one that is not implemented, not wanted or of another
            model; names what is missing or differs.
    """
    opened = open_model(
        folder or loaded.name,
        revision=revision,
        download_dir=download_dir,
        language_model_only=language_model_only,
        is_head=folder is not None,
    )
    if not issubclass(opened.family, HasDraftHead):
        raise ValueError(f"{opened.family.__name__} has no head that predicts further tokens")
    if opened.gguf is not None or isinstance(opened.reader, OrbaxWeights):
        raise ValueError(f"{opened.reader.location}: heads are read from folders of safetensors only")
    build = build_context(
        loaded.mesh,
        loaded.dtype,
        stacked=loaded.stacked,
        expert_parallel=loaded.expert_parallel,
        compact_tiles=compact_tiles,
    )
    # The head is a model but for the tables, which it has no sources for.
    config = opened.config.get_text_config() if folder is None else opened.config
    head = abstract_model(opened.family.draft_head, config, build)  # type: ignore[arg-type]
    assert isinstance(head, DraftHead)
    check(head)
    _check_masks(head, opened)
    _check_reads(head, loaded, opened.reader.location)
    taps = _taps(head, loaded, opened.reader.location)
    tables = _tables_of_model(head, loaded, opened.reader, own_folder=folder is not None)
    if "embed_tokens" in tables and isinstance(head, ScalesEmbedding) and isinstance(loaded.model, ScalesEmbedding):
        head.embed_factor = loaded.model.embed_factor
    bias = loaded.model.head_bias if isinstance(loaded.model, HasHeadBias) else None
    if "lm_head" in tables and isinstance(head, HasHeadBias) and bias is not None:
        head.head_bias = bias
        tables = (*tables, "head_bias")
    graphdef, abstract = nnx.split(head)
    own = nnx.State({name: part for name, part in abstract.items() if name not in tables})
    reader = _HeadReader(opened.reader, targets_of(head, tables))
    params = read_params(head, own, reader, loaded.mesh, quantization=quantization, without=tables)
    if build.product_impl == "cpu":
        use_large_pages(jax.tree.leaves(params))
    return LoadedHead(head, graphdef, params, tables, taps)


class _HeadReader(RenamedTensors):
    """Reads the tensors of a head only, so that no other is missed; those of parameters of whole numbers, which say
    what tokens there are, as they are stored."""

    def __init__(self, whole: TensorReader, targets: Sequence[Target]):
        super().__init__(whole, {name: name for target in targets for name in target.source.sources})
        numbers = (target for target in targets if np.issubdtype(target.dtype, np.integer))
        self._numbers = {name for target in numbers for name in target.source.sources}

    def read(self, name: str) -> np.ndarray | HostArray:
        if name in self._numbers and isinstance(self._whole, SafetensorsWeights):
            return self._whole.read_codes(name)
        return super().read(name)


def _taps(head: DraftHead, loaded: LoadedModel, location: str) -> tuple[int, ...]:
    """Return the layers whose entering states a head reads.

    Raises:
        ValueError: the head is one of a model of another vocabulary or width, or the model cannot return these states.
    """
    if head.vocab_size != loaded.model.vocab_size:
        raise ValueError(
            f"{location}: a head for {head.vocab_size} tokens, and the model has {loaded.model.vocab_size}: it needs "
            "the head that was trained for it"
        )
    config = loaded.config.get_text_config()
    taps = head.taps(config.num_hidden_layers)
    if taps and not isinstance(loaded.model, Tappable):
        raise ValueError(f"{type(loaded.model).__name__} cannot return the states that enter its layers {taps}")
    want = max(1, len(taps)) * config.hidden_size
    if head.states != want:
        raise ValueError(
            f"{location}: the head reads {head.states} numbers of each token, and the model's {max(1, len(taps))} "
            f"states have {want}: it needs the head that was trained for it"
        )
    return taps


_MASK_FILE = "mask_embedding.pt"
"""The file of a drafter whose masks have an embedding that is in no table."""


def _check_masks(head: DraftHead, opened: OpenedModel) -> None:
    """Raise ValueError if a folder holds an embedding of the masks of a block that is in no table."""
    if head.block is not None and (opened.source.path / _MASK_FILE).exists():
        raise ValueError(
            f"{opened.reader.location}: {_MASK_FILE} is not supported; masks have the embedding of the token "
            f"mask_token_id={head.block.mask_token}, in the model's table or the folder's embed_tokens"
        )


def _check_reads(head: DraftHead, loaded: LoadedModel, location: str) -> None:
    """Raise ValueError unless the model keeps the KV that a head's layers attend to."""
    groups = {group.name: group for group in loaded.model.layer_groups}
    for want in head.reads:
        found = groups.get(want.name)
        if not isinstance(found, AttentionGroup):
            raise ValueError(f"{location}: the head attends to {want.kind} layers, and the model has none")
        for field in ("kv_heads", "head_dim", "sliding_window"):
            if getattr(found, field) != getattr(want, field):
                raise ValueError(
                    f"{location}: the head attends to {want.kind} layers of {field}={getattr(want, field)}, and the "
                    f"model's have {getattr(found, field)}: it needs the head that was trained for it"
                )


def _tables_of_model(
    head: DraftHead, loaded: LoadedModel, reader: TensorReader, *, own_folder: bool
) -> tuple[str, ...]:
    """Return which tables a head has in common with the model: those that the checkpoint has no tensors of, or repeats
    for the head as they are.

    Raises:
        ValueError: such a table is of another width than the head.
    """
    there = set(reader.names())
    of_model = {source.path[0]: source.sources[0] for source in loaded.model.weights() if source.path[0] in head.tables}

    def is_own(source: WeightSource) -> bool:
        (table, *_), (name, *_) = source.path, source.sources
        if table not in head.tables or name not in there:
            return False
        return own_folder or not same_numbers(reader, name, of_model[table])

    own = {source.path[0] for source in head.weights() if is_own(source)}
    shapes, of_head = flat_values(nnx.state(loaded.model)), flat_values(nnx.state(head))
    parts = {path[0] for path in of_head}
    tables = tuple(table for table in head.tables if table in parts and table not in own)
    for path, shape in of_head.items():
        if path[0] in tables:
            # One table serves both ends of a tied model.
            found = shapes[path if path in shapes else ("embed_tokens", *path[1:])]
            if found.shape != shape.shape:
                raise ValueError(
                    f"{reader.location} has no {path[0]} of its own, and the model's is of {found.shape} where the "
                    f"head's would be of {shape.shape}"
                )
    return tables
