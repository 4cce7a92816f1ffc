"""Lowers an engine's largest programs from shapes alone: nothing is loaded, placed or run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jpaged.execution.batch import empty_batch
from jpaged.execution.caches.adapters import AdapterCache
from jpaged.execution.caches.pool import PoolSpec, abstract_pool
from jpaged.execution.compile.buckets import Bucket, Buckets
from jpaged.execution.device_memory import device_bytes
from jpaged.execution.encode import (
    RowLengths,
    between_parts,
    calls,
    decodes_read_images,
    image_group,
    make_encode,
    make_encode_part,
    no_rows,
    numbers_together,
    row_lengths,
)
from jpaged.execution.image_rows import ImageRows, Item
from jpaged.execution.mesh import num_replicas, own_shapes, own_sharding, platform, stack
from jpaged.execution.packing import pack
from jpaged.execution.sampling.pair_tables import PairTables
from jpaged.execution.sampling.sample_step import make_sample_step
from jpaged.execution.sampling.sampling_batch import RANKED, blank_rows
from jpaged.execution.step import make_step
from jpaged.execution.transfer.adapter_matrices import with_abstract_matrices
from pallas_kernels.platform import Impl

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class StepPrograms:
    """Lowers the largest programs for some devices, which may be a compiler's targets that this machine lacks.

    Attributes:
        params: arrays, or shapes with shardings.
        kernel_impl: which kernels run; None = what this process's platform is best at.
        examples: images that the encoder is compiled for, see `jpaged.model_api.TakesImages`; none where it does not
            run.
        image_rows: packs images into rows; None = the encoder takes them one by one.
        prefix: what the names of the model's layer groups begin with in `spec`, where it drafts for another model, see
            `jpaged.execution.step.make_step`.
    """

    graphdef: nnx.GraphDef
    params: Any
    spec: PoolSpec
    mesh: Mesh
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    vocab_size: int
    kernel_impl: Impl | None = None
    examples: tuple[tuple[Mapping[str, np.ndarray], int], ...] = ()
    image_rows: ImageRows | None = None
    prefix: str = ""

    def decode(self) -> jax.stages.Lowered:
        """Lower the step in which max_num_seqs sequences have one token each."""
        return self._step(self._buckets.decode[-1], images=bool(self.examples) and decodes_read_images(self.spec))

    def mixed(self) -> jax.stages.Lowered:
        """Lower the step of max_num_batched_tokens tokens, prompts among them, with images where the encoder runs."""
        return self._step(self._buckets.mixed[-1], images=bool(self.examples))

    def verifying(self) -> jax.stages.Lowered:
        """Lower the step of the fewest tokens in which drafts are verified."""
        seqs, tokens = self.max_num_seqs, self.max_num_batched_tokens
        return self._step(
            Buckets(max_num_seqs=seqs, max_num_batched_tokens=tokens, verifies=True).mixed[0], images=False
        )

    def sampler(self, *, top: int = RANKED) -> jax.stages.Lowered:
        """Lower logits and draw of max_num_seqs rows with any parameters; with ``top=0`` the plain variant."""
        _, hidden, *_ = self.mixed().out_info
        hidden = jax.ShapeDtypeStruct(hidden.shape, hidden.dtype, sharding=own_sharding(self.mesh))
        rows = self._of_all(blank_rows(self.max_num_seqs, self.vocab_size))
        draw = make_sample_step(self.graphdef, self.mesh)
        return draw.lower(self.params, hidden, rows, self._last_tokens, top=top)

    @property
    def table_bytes(self) -> int:
        """Return the bytes on each device of the tables that a draw of max_num_seqs rows may take, see `PairTables`."""
        rows = self._of_all(blank_rows(self.max_num_seqs, self.vocab_size))
        return device_bytes(PairTables(self.mesh, self.vocab_size).tables(rows, self._last_tokens))

    def encoder(self) -> jax.stages.Lowered | None:
        """Lower the encoder for its largest batch of the largest image, or the longest row, that one step encodes; None
        without an encoder."""
        if not self.examples:
            return None
        encode = make_encode(self.graphdef, self.spec, self.mesh, kernel_impl=self.kernel_impl)
        pool = abstract_pool(self.spec, self.mesh)
        if (lengths := self._row_lengths) is not None:
            return encode.lower(self.params, pool, *self._row(lengths.whole[-1]))
        arrays, count = max(self.examples, key=lambda example: sum(array.size for array in example[0].values()))
        rows = no_rows(self.spec, count)
        group, budget = image_group(self.spec), self.max_num_batched_tokens
        number, *_ = numbers_together(group, len(rows), budget, platform=platform(self.mesh))
        (call,) = calls([[(arrays, rows)] * number], (number,))
        return encode.lower(self.params, pool, *self._of_all(call[0]))

    def encoder_part(self) -> jax.stages.Lowered | None:
        """Lower what encodes the longest row over several steps; None where no row is encoded so."""
        lengths = self._row_lengths
        if lengths is None or not lengths.in_parts:
            return None
        arrays, rows = self._row(lengths.in_parts[-1])
        encode = make_encode_part(self.graphdef, self.spec, self.mesh, kernel_impl=self.kernel_impl)
        part = self._of_all(np.zeros(2, np.int32))
        pool = abstract_pool(self.spec, self.mesh)
        return encode.lower(
            self.params, pool, self._between_parts(arrays), own_shapes(dict(arrays), self.mesh), rows, part
        )

    @property
    def half_encoded_bytes(self) -> int:
        """Return the most bytes on each device of what is kept of images that are encoded over several steps: arrays of
        rows, and their states."""
        lengths = self._row_lengths
        if lengths is None or not lengths.in_parts:
            return 0
        arrays, _ = self._row(lengths.in_parts[-1])
        kept = own_shapes(dict(arrays), self.mesh), self._between_parts(arrays)
        return device_bytes(kept) * min(len(lengths.in_parts), num_replicas(self.mesh))

    def _between_parts(self, arrays: Mapping[str, np.ndarray]) -> Any:
        return between_parts(self.graphdef, self.params, self.mesh, arrays, self.kernel_impl)

    @property
    def _row_lengths(self) -> RowLengths | None:
        """Return the lengths of rows that the engine encodes; None where its encoder takes no rows or does not run."""
        if not self.examples or self.image_rows is None:
            return None
        limits = {"max_num_batched_tokens": self.max_num_batched_tokens, "max_num_seqs": self.max_num_seqs}
        return row_lengths(image_group(self.spec), self.image_rows, **limits)

    def _row(self, length: int) -> tuple[Mapping[str, np.ndarray], np.ndarray]:
        """Return the arrays of a row of so many patches, and where its features go, of all replicas."""
        assert self.image_rows is not None
        patches = self.image_rows.patches
        arrays, count = next(example for example in self.examples if patches(example[0]) == length)
        item = Item(arrays, no_rows(self.spec, count)[:count])
        (row,) = self.image_rows.joined([[item]], partial(no_rows, self.spec))
        return self._of_all((row.arrays, row.rows))

    @property
    def _buckets(self) -> Buckets:
        return Buckets(max_num_seqs=self.max_num_seqs, max_num_batched_tokens=self.max_num_batched_tokens)

    @property
    def _last_tokens(self) -> jax.ShapeDtypeStruct:
        zeros = self._of_all(np.zeros(self.max_num_seqs, np.int32))
        return jax.ShapeDtypeStruct(zeros.shape, zeros.dtype, sharding=own_sharding(self.mesh))

    def _of_all(self, of_one: T) -> T:
        return stack(self.mesh, [of_one] * num_replicas(self.mesh))

    def _step(self, bucket: Bucket, *, images: bool) -> jax.stages.Lowered:
        spec = self.spec
        adapts = any(isinstance(cache, AdapterCache) for cache in spec.caches)
        bucket = replace(bucket, images=images, adapters=adapts)
        pool = abstract_pool(spec, self.mesh)
        batch = empty_batch(bucket, spec, max_num_seqs=self.max_num_seqs, max_model_len=self.max_model_len)
        packed = pack(self.mesh, with_abstract_matrices(self._of_all(batch), spec, self.mesh))
        alone = not self.prefix
        step = make_step(self.graphdef, spec, self.mesh, kernel_impl=self.kernel_impl, prefix=self.prefix, alone=alone)
        return step.lower(self.params, pool, packed, self._last_tokens, decode_only=bucket.decode_only)
