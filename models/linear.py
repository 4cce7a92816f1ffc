"""Multiplies with parameters, in one place for all models: `Linear`, `ExpertLinear`, `HeadLinear` and `Embedding`.

A layer calls them and does not know how its weights are held: as a float matrix, quantised, in a `PerLayerWeights`,
or split over the mesh. Products of float32 are computed in float32 on every platform. Parameters are held unsharded
here; `partition` says how each is split.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from jpaged.model_api import TENSOR_AXIS, BuildContext, WeightSource
from pallas_kernels.held_matrix import HeldMatrix, is_held
from pallas_kernels.low_rank import AdaptedMatrix
from pallas_kernels.platform import Impl
from pallas_kernels.products import multiply, multiply_grouped, multiply_table
from pallas_kernels.stacked_row import StackedTable

from .mixture import Dispatch
from .parameters import LayerTable, constant_param, random_param
from .per_layer_weights import PerLayerWeights
from .weights import Converter, Padded, as_stored, pad_rows

LiveRows: TypeAlias = Int[Array, ""] | None
"""Number of rows, the first ones, that are a step's tokens or samples; products of the others may be 0. None: all."""

Rows = TypeVar("Rows")
Made = TypeVar("Made")


def in_turn(
    function: Callable[[Rows, LiveRows], Made], at_once: int | None, rows: Rows, live_rows: LiveRows = None
) -> Made:
    """Return ``function(rows, live_rows)``, which makes rows of rows, each of its own; of more than `at_once` only so
    many are computed at a time, so that what is made in between takes no more memory than theirs.

    Args:
        rows: a tree of arrays of as many rows.
        at_once: None = all rows at a time.
    """
    number = len(jax.tree.leaves(rows)[0])
    parts = 1 if at_once is None else -(-number // at_once)
    if parts <= 1:
        return function(rows, live_rows)
    each = -(-number // parts)

    def cut(x: Array) -> Array:
        x = jnp.pad(x, ((0, parts * each - number), *((0, 0),) * (x.ndim - 1)))
        return x.reshape(parts, each, *x.shape[1:])

    def part(given: tuple[Array, Rows]) -> Made:
        first, own = given
        return function(own, None if live_rows is None else jnp.clip(live_rows - first, 0, each))

    firsts = jnp.arange(parts, dtype=jnp.int32) * each
    made = jax.lax.map(part, (firsts, jax.tree.map(cut, rows)))
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:number], made)


class Linear(nnx.Module):
    """``x @ weight + bias``; weight [inputs, outputs], bias [outputs].

    Args:
        partition: how the weight is split over the mesh; the bias follows its columns.
    """

    def __init__(self, inputs: int, outputs: int, build: BuildContext, *, partition: P, bias: bool = False):
        self.weight = random_param(build, (inputs, outputs))
        self.bias = constant_param(build, (outputs,)) if bias else None
        self.partition = partition
        self.input_shards = build.tensor_parallel if partition[0] == TENSOR_AXIS else 1
        self.impl = _whole_impl(build)
        self.bfloat16_tiles = build.bfloat16_tiles

    def __call__(self, x: Float[Array, "tokens inputs"], live_rows: LiveRows = None) -> Float[Array, "tokens outputs"]:
        """Return the product in the dtype of `x`; its rows from `live_rows` on mean nothing."""
        out = _dot(x, self.weight[...], live_rows, self.impl, self.input_shards)
        return out if self.bias is None else out + self.bias[...]

    def weights(
        self,
        path: tuple[str, ...],
        tensors: Sequence[str],
        layer: int | None,
        convert: Converter,
        convert_bias: Converter = as_stored,
        *,
        unit: int = 0,
        may_quantise: bool = True,
    ) -> Iterator[WeightSource]:
        """Yield the sources of this module at `path` in its layer: checkpoint tensors ``{tensor}.weight`` and
        ``{tensor}.bias``.

        Args:
            convert: makes the weight from the tensors, each [outputs, inputs]; `convert_bias` the bias.
            unit: see `WeightSource`.
            may_quantise: whether the weight may be held quantised.
        """
        weights, contracted = tuple(f"{tensor}.weight" for tensor in tensors), -2 if may_quantise else None
        weight, tiled, floats = (*path, "weight"), self.impl == "cpu", self.bfloat16_tiles if may_quantise else None
        yield WeightSource(
            weight, weights, convert, self.partition, layer, contracted, unit, tiled, floats, adaptable=True
        )
        if self.bias is not None:
            biases = tuple(f"{tensor}.bias" for tensor in tensors)
            yield WeightSource((*path, "bias"), biases, convert_bias, P(self.partition[-1]), layer)


@partial(jax.tree_util.register_dataclass, data_fields=("weight", "bias"), meta_fields=("impl",))
@dataclass(frozen=True)
class ExpertTable:
    """Holds the arrays of an `ExpertLinear`, or those of the experts that a device holds.

    Attributes:
        weight: [experts, inputs, outputs].
        bias: [experts, outputs], or None.
        impl: which version of `multiply_grouped` multiplies.
    """

    weight: Float[Array, "experts inputs outputs"] | HeldMatrix | PerLayerWeights
    bias: Float[Array, "experts outputs"] | PerLayerWeights | None
    impl: Impl

    @property
    def experts(self) -> int:
        """Return how many experts there are."""
        return self.weight.shape[0]

    def multiply(self, x: Float[Array, "rows inputs"], rows: Dispatch) -> Float[Array, "rows outputs"]:
        """Multiply each row with its expert's matrix and add its bias; `x` is sorted by expert, as `rows` says."""
        out = _grouped_dot(x, self.weight, rows.counts, self.impl)
        return out if self.bias is None else out + _rows_of_expert(self.bias, rows.expert)


class ExpertLinear(nnx.Module):
    """A `Linear` for each expert; weight [experts, inputs, outputs], bias [experts, outputs].

    Args:
        partition: how the weight is split over the mesh; the bias follows its experts and columns.
    """

    def __init__(
        self, experts: int, inputs: int, outputs: int, build: BuildContext, *, partition: P, bias: bool = False
    ):
        self.weight = random_param(build, (experts, inputs, outputs), kind=LayerTable)
        self.bias = constant_param(build, (experts, outputs), kind=LayerTable) if bias else None
        self.partition = partition
        self.bias_partition = P(partition[0], partition[-1])
        # Whole experts are multiplied on their own device.
        self.impl = build.product_impl if build.expert_parallel else _whole_impl(build)
        self.bfloat16_tiles = build.bfloat16_tiles

    @property
    def table(self) -> ExpertTable:
        """Return the arrays that multiply; `jax.shard_map` may split them by experts."""
        bias = None if self.bias is None else _of_layer(self.bias[...])
        return ExpertTable(_of_layer(self.weight[...]), bias, self.impl)

    @property
    def stacked_table(self) -> StackedTable | None:
        """Return the weight as one of a stack, alone where layers are not stacked; None: layers lie apart."""
        return _stacked(self.weight[...])

    @property
    def stacked_bias(self) -> StackedTable | None:
        """Return the bias likewise; None: there is none, or layers lie apart."""
        return None if self.bias is None else _stacked(self.bias[...])

    def weights(
        self,
        path: tuple[str, ...],
        tensors: Sequence[str],
        layer: int,
        convert: Converter,
        convert_bias: Converter = as_stored,
    ) -> Iterator[WeightSource]:
        """Yield the sources of this module at `path` in its layer: the checkpoint's `tensors`, and ``{tensor}_bias`` of
        each where there are biases."""
        yield WeightSource(
            (*path, "weight"),
            tuple(tensors),
            convert,
            self.partition,
            layer,
            contracted=-2,
            tiled=self.impl == "cpu",
            bfloat16_tiles=self.bfloat16_tiles,
        )
        if self.bias is not None:
            biases = tuple(f"{tensor}_bias" for tensor in tensors)
            yield WeightSource((*path, "bias"), biases, convert_bias, self.bias_partition, layer)


def _of_layer(table: Any) -> Any:
    """Return a layer's table, read out of the stack if it lies in one."""
    return table.read() if isinstance(table, StackedTable) else table


def _stacked(table: Any) -> StackedTable | None:
    """Return a layer's table as one of a stack, a single one as a stack of one; None if the layers' lie apart."""
    if isinstance(table, StackedTable):
        return table
    if isinstance(table, PerLayerWeights):
        return None
    return StackedTable(jax.tree.map(lambda part: part[None], table), jnp.int32(0))


class HeadLinear(nnx.Module):
    """Maps each head's vectors into a space that all heads share, and back, by two matrices per head.

    weight [heads * (inner + outer), shared], head by head the rows that lead in and those that lead out. Heads are
    split over the mesh.
    """

    def __init__(self, heads: Padded, inner: int, outer: int, shared: int, build: BuildContext):
        self.rows = replace(heads, each=inner + outer)
        self.weight = random_param(build, (self.rows.size, shared))
        self.heads = heads.size
        self.inner = inner

    def into(self, x: Float[Array, "tokens heads inner"]) -> Float[Array, "tokens heads shared"]:
        """Return the vectors in the shared space."""
        return self._multiply("thi,his->ths", slice(None, self.inner), x)

    def out_of(self, x: Float[Array, "tokens heads shared"]) -> Float[Array, "tokens heads outer"]:
        """Return vectors of the shared space in each head's own."""
        return self._multiply("ths,hos->tho", slice(self.inner, None), x)

    def _multiply(self, product: str, rows: slice, x: Array) -> Array:
        def multiply(x: Array, matrix: Any) -> Array:
            array: Array = matrix.dequantised(x.dtype) if is_held(matrix) else matrix
            own = array.reshape(self.heads, -1, array.shape[1])[:, rows]
            precision = jax.lax.Precision.HIGHEST if own.dtype == jnp.float32 else None
            return jnp.einsum(product, x, own, precision=precision, preferred_element_type=x.dtype)

        weight = self.weight[...]
        return weight.multiply(multiply, x) if isinstance(weight, PerLayerWeights) else multiply(x, weight)

    def weights(self, path: tuple[str, ...], tensor: str, layer: int) -> Iterator[WeightSource]:
        """Yield the source of this module at `path` in its layer: the checkpoint tensor ``{tensor}.weight``, with zero
        heads after its own."""
        rows, split = pad_rows(self.rows), P(TENSOR_AXIS, None)
        yield WeightSource((*path, "weight"), (f"{tensor}.weight",), rows, split, layer, -1)


class Embedding(nnx.Module):
    """A table [vocab, embed] whose rows are read, and which as the vocabulary's head multiplies hidden states.

    Args:
        partition: how the table is split over the mesh.
    """

    def __init__(self, vocab: int, embed: int, build: BuildContext, *, partition: P):
        self.weight = random_param(build, (vocab, embed))
        self.partition = partition
        self.dtype = build.dtype
        self.impl = _whole_impl(build)
        self.bfloat16_tiles = build.bfloat16_tiles

    def __call__(self, ids: Int[Array, " tokens"]) -> Float[Array, "tokens embed"]:
        """Read rows of the table; ids out of range (padding) read some row: their results are not used."""
        table = self.weight[...]
        if is_held(table):
            return table.read_rows(ids, self.dtype)
        return jnp.take(table, ids, axis=0, mode="clip")

    def logits(self, hidden: Float[Array, "seqs embed"], live_rows: LiveRows = None) -> Float[Array, "seqs vocab"]:
        """Return ``hidden @ table.T`` in float32; its rows from `live_rows` on mean nothing."""
        return multiply_table(hidden, self.weight[...], rows=live_rows, impl=self.impl)

    @property
    def array(self) -> Float[Array, "vocab embed"] | None:
        """Return the table, or None where it is held otherwise than as an array."""
        table = self.weight[...]
        return None if is_held(table) else table

    def weights(
        self, path: tuple[str, ...], tensor: str, convert: Converter, *, may_quantise: bool = True
    ) -> Iterator[WeightSource]:
        """Yield the table's source: the checkpoint tensor ``{tensor}.weight``."""
        contracted = -1 if may_quantise else None
        tiled, floats = self.impl == "cpu", self.bfloat16_tiles if may_quantise else None
        weight, names = (*path, "weight"), (f"{tensor}.weight",)
        yield WeightSource(weight, names, convert, self.partition, None, contracted, 0, tiled, floats)


def within_vocabulary(logits: Float[Array, "seqs rows"], vocab_size: int) -> Float[Array, "seqs rows"]:
    """Return logits with -inf in the places of a table's padding, which are those from `vocab_size` on."""
    if logits.shape[1] == vocab_size:
        return logits
    return jnp.where(jnp.arange(logits.shape[1]) < vocab_size, logits, -jnp.inf)


def _whole_impl(build: BuildContext) -> Impl:
    """Return the version that multiplies with matrices that are cut for the devices: XLA cannot cut a Triton launch."""
    return "xla" if build.product_impl == "gpu" and build.tensor_parallel > 1 else build.product_impl


def _dot(
    x: Array, weight: Array | HeldMatrix | PerLayerWeights | AdaptedMatrix, live_rows: LiveRows, impl: Impl, shards: int
) -> Array:
    if isinstance(weight, AdaptedMatrix):
        return _dot(x, weight.weight, live_rows, impl, shards) + weight.addition(x)
    bank = weight if isinstance(weight, PerLayerWeights) else PerLayerWeights((weight,), 0)
    return multiply(x, bank.matrices, bank.index, rows=live_rows, input_shards=shards, impl=impl)


def _rows_of_expert(table: Array | PerLayerWeights, expert: Int[Array, " rows"]) -> Float[Array, "rows outputs"]:
    """Return the entry of each row's expert, such as its bias; some entry for an expert that is not here."""

    def pick(expert: Array, table: Array) -> Array:
        return jnp.take(table, expert, axis=0, mode="clip")

    return table.multiply(pick, expert) if isinstance(table, PerLayerWeights) else pick(expert, table)


def _grouped_dot(
    x: Float[Array, "rows inputs"],
    weight: Array | HeldMatrix | PerLayerWeights,
    counts: Int[Array, " experts"],
    impl: Impl,
) -> Float[Array, "rows outputs"]:
    """Multiply rows, sorted by expert, with their experts' matrices; the first ``counts[0]`` rows are expert 0's."""

    def product(x: Array, matrices: Array | HeldMatrix) -> Array:
        return multiply_grouped(x, matrices, counts, impl=impl)

    return weight.multiply(product, x) if isinstance(weight, PerLayerWeights) else product(x, weight)
