"""Loads the head of a checkpoint that drafts from the model's hidden states."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import jax
from flax import nnx

from jpaged.loading.build_context import CompactTiles, build_context
from jpaged.loading.loaded_model import LoadedModel
from jpaged.loading.open_checkpoint import open_model
from jpaged.loading.orbax.checkpoint import OrbaxWeights
from jpaged.loading.parameters.targets import abstract_model, targets_of
from jpaged.loading.parameters.weights import read_params
from jpaged.loading.renamed_tensors import RenamedTensors, same_numbers
from jpaged.loading.tensor_reader import TensorReader
from jpaged.model_api import DraftHead, HasDraftHead
from pallas_kernels.large_pages import use_large_pages


@dataclass(frozen=True)
class LoadedHead:
    """Holds a head in memory.

    Attributes:
        head: the head with shapes in place of arrays.
        graphdef: the head without its weights.
        params: its own weights, on the model's mesh, without the model's tables.
        tables: those of `DraftHead.tables` that are the model's.
    """

    head: DraftHead
    graphdef: nnx.GraphDef
    params: nnx.State
    tables: tuple[str, ...]


def load_draft_head(
    loaded: LoadedModel,
    *,
    revision: str | None,
    download_dir: str | Path | None,
    language_model_only: bool,
    quantization: str | None,
    compact_tiles: CompactTiles | None,
) -> LoadedHead:
    """Load the head that a model's checkpoint holds besides the model.

    Args:
        revision, download_dir, language_model_only, quantization, compact_tiles: those that the model was loaded with,
            see `load_model`.

    Raises:
        ValueError: the family or the checkpoint has no head, or one that is not implemented; names what is missing.
    """
    opened = open_model(
        loaded.name, revision=revision, download_dir=download_dir, language_model_only=language_model_only
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
    head = abstract_model(opened.family.draft_head, opened.config.get_text_config(), build)  # type: ignore[arg-type]
    assert isinstance(head, DraftHead)
    graphdef, abstract = nnx.split(head)
    tables = _tables_of_model(head, loaded, opened.reader)
    own = nnx.State({name: part for name, part in abstract.items() if name not in tables})
    names = [target.source.sources for target in targets_of(head, tables)]
    reader = RenamedTensors(opened.reader, {name: name for each in names for name in each})  # no other is missed
    params = read_params(head, own, reader, loaded.mesh, quantization=quantization, without=tables)
    if build.product_impl == "cpu":
        use_large_pages(jax.tree.leaves(params))
    return LoadedHead(head, graphdef, params, tables)


def _tables_of_model(head: DraftHead, loaded: LoadedModel, reader: TensorReader) -> tuple[str, ...]:
    """Return which tables a head has in common with the model: those that the checkpoint has no tensors of, or repeats
    for the head as they are."""
    there = set(reader.names())
    of_model = {source.path[0]: source.sources[0] for source in loaded.model.weights() if source.path[0] in head.tables}
    other = {
        source.path[0]
        for source in head.weights()
        if source.path[0] in head.tables
        and source.sources[0] in there
        and not same_numbers(reader, source.sources[0], of_model[source.path[0]])
    }
    return tuple(table for table in head.tables if table not in other)
