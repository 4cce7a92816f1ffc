"""Computes a mixture of experts: each token goes through the few MLPs its router picks (Shazeer et al., 2017)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from jpaged.model_api import TENSOR_AXIS, BuildContext, WeightSource
from pallas_kernels.expert_mlps import Biases, DenseChoice, dense_choice, expert_mlps, takes
from pallas_kernels.held_matrix import is_held
from pallas_kernels.stacked_row import StackedTable

from . import weights as convert
from .layers import ACTIVATIONS, MLP_NAMES, GatedMLP
from .linear import ExpertLinear, ExpertTable, Linear, LiveRows
from .mixture import ExpertLayout, by_expert
from .routing import Router, Routing
from .shards import each_shard


class ExpertMLPs(nnx.Module):
    """Applies the MLPs of a token's experts, and sums their results.

    gate_up [experts, embed, 2 * mlp] and down [experts, mlp, embed], the columns of each expert as in `GatedMLP`. Those
    of a device, and down's, are padded to multiples of `BuildContext.column_unit` where a launch may take them. Without
    gates, gate_up holds up alone, [experts, embed, mlp]. Tokens are sorted by expert, so that work follows the tokens,
    not the experts; a TPU need not sort them, see `launches`.

    Args:
        gated: whether the MLPs are gated.
        bias: whether both matrices have biases, [experts, 2 * mlp] and [experts, embed].
        combine: makes of gate and up what `down` multiplies; None = ``activation(gate) * up``.
        weighs_inputs: whether an expert's share multiplies the MLP's input, as in Llama 4, instead of its output.
    """

    def __init__(
        self,
        embed: int,
        width: int,
        activation: str,
        build: BuildContext,
        *,
        layout: ExpertLayout,
        gated: bool = True,
        weighs_inputs: bool = False,
        bias: bool = False,
        combine: Callable[[Array, Array], Array] | None = None,
    ):
        # No launch takes inputs that are weighed, or GELU's error function, which Mosaic lacks.
        self.may_launch = not weighs_inputs and activation != "gelu"
        unit = build.column_unit if self.may_launch else 1
        self.width = layout.columns(width, unit)
        self.embed = convert.Padded(embed, 1, unit=unit)
        mlp, experts = self.width.size, layout.experts
        columns, rows = layout.partition(None, None, TENSOR_AXIS), layout.partition(None, TENSOR_AXIS, None)
        self.gate_up = ExpertLinear(experts, embed, 2 * mlp if gated else mlp, build, partition=columns, bias=bias)
        self.down = ExpertLinear(experts, mlp, self.embed.size, build, partition=rows, bias=bias)
        self.activation = activation
        self.layout = layout
        self.gated = gated
        self.combine = combine
        self.weighs_inputs = weighs_inputs
        self.impl = build.product_impl

    def __call__(
        self,
        x: Float[Array, "tokens embed"],
        share: Float[Array, "tokens per_token"],
        chosen: Int[Array, "tokens per_token"],
    ) -> Float[Array, "tokens embed"]:
        if self.launches(x):
            return self.of_dense(x, dense_choice(share, chosen, self.layout.experts))
        return self.layout.mix(self._mlps, x, share, chosen, (self.gate_up.table, self.down.table))

    def launches(self, x: Float[Array, "tokens embed"]) -> bool:
        """Tell whether `of_dense` may be called with these tokens, on TPUs (docs/decisions/0076)."""
        if self.impl not in ("tpu", "tpu_interpret") or not self.may_launch:
            return False
        gate_up, down, shards = self.gate_up.stacked_table, self.down.stacked_table, self.layout.column_shards
        if gate_up is None or down is None:
            return False
        experts = self.layout.experts
        biased = 0 if self.down.bias is None else experts // (self.layout.devices if self.layout.whole else 1)
        shapes = [
            StackedTable(jax.ShapeDtypeStruct(one.stack.shape, x.dtype), one.number) if is_held(one.stack) else one
            for one in (gate_up, down)
        ]
        return takes(x, shapes[0], shapes[1], self.impl, experts=experts, column_shards=shards, biased=biased)

    def of_dense(self, x: Float[Array, "tokens embed"], choice: DenseChoice) -> Float[Array, "tokens embed"]:
        """Return the sum by one launch of each device, which has its own experts, or its own columns of all.

        Args:
            choice: of the experts of all devices.
        """
        both = self.gate_up, self.down

        def on_device(x: Array, share: Array, tables: list[StackedTable], biases: list[StackedTable]) -> Array:
            added = Biases(biases[0], biases[1], self.layout.adds_bias) if biases else None
            own = DenseChoice(share, self.layout.first_here)
            gate_up, down = tables
            out = expert_mlps(x, own, gate_up, down, self._inner, gated=self.gated, biases=added, impl=self.impl)
            return self.layout.total(out)

        spec: Any = StackedTable
        biases: list[Any] = [one.stacked_bias for one in both if one.bias is not None]
        in_tables = [spec(P(None, *one.partition), P()) for one in both]
        in_biases = [spec(P(None, *one.bias_partition), P()) for one in both if one.bias is not None]
        launch = each_shard(on_device, (P(), P(), in_tables, in_biases), P())
        tables: list[Any] = [one.stacked_table for one in both]
        if any(is_held(table.stack) for table in tables):
            # A launch has one number for all stacks. XLA splits what it dequantises over the devices.
            tables = [_alone(one, x.dtype) for one in tables]
            biases = [_alone(one, x.dtype) for one in biases]
        return launch(x, choice.share, tables, biases)

    def _inner(self, gate: Array, up: Array | None = None) -> Array:
        """Return what `down` multiplies, of gate and up, or of up alone where there are no gates."""
        if up is None:
            return ACTIVATIONS[self.activation](gate)
        return ACTIVATIONS[self.activation](gate) * up if self.combine is None else self.combine(gate, up)

    def _mlps(self, x: Array, share: Array, chosen: Array, tables: tuple[ExpertTable, ExpertTable]) -> Array:
        gate_up, down = tables
        rows = by_expert(chosen, down.experts)
        shares = share.reshape(-1)[rows.pair, None]
        inputs = x[rows.token] * shares if self.weighs_inputs else x[rows.token]
        both = gate_up.multiply(inputs, rows)
        if self.gated:
            gate, up = jnp.split(both.reshape(len(both), self.layout.column_shards, -1), 2, axis=-1)
            inner = self._inner(gate, up).reshape(len(both), -1)
        else:
            inner = self._inner(both)
        out = down.multiply(inner, rows)[:, : x.shape[1]]
        return rows.combine(out if self.weighs_inputs else out * shares, into=x)

    def weights(
        self,
        path: tuple[str, ...],
        name: str,
        layer: int,
        separate: tuple[str, ...] | None = None,
        *,
        outputs_first: bool = False,
        alternating: bool = False,
    ) -> Iterator[WeightSource]:
        """Yield the sources of ``{name}.gate_up_proj`` and ``{name}.down_proj``, which hold all experts, and of their
        biases.

        Args:
            separate: names of an expert's tensors if each expert has its own, ``{name}.0.{separate[0]}.weight``: of
                gate, up and down, or without gates of up and down.
            outputs_first: whether the tensors of all experts are [experts, out, in], not [experts, in, out].
            alternating: whether columns of gate and up alternate in the tensors of all experts.
        """
        if separate is None:
            split = convert.split_alternating if alternating else convert.split_gate_up
            fuse, pad = split(self.width), convert.pad_axes(-2, self.width, self.embed)
            of_bias, of_down = fuse, convert.pad_axes(-1, self.embed)
            if outputs_first:
                fuse, pad = convert.inputs_first(fuse), convert.inputs_first(pad)
            yield from self.gate_up.weights((*path, "gate_up"), (f"{name}.gate_up_proj",), layer, fuse, of_bias)
            yield from self.down.weights((*path, "down"), (f"{name}.down_proj",), layer, pad, of_down)
            return
        experts = range(self.layout.experts)
        into = [f"{name}.{expert}.{part}.weight" for expert in experts for part in separate[:-1]]
        fuse = convert.stack_gate_up(self.width) if self.gated else convert.stack_linear(outputs=self.width)
        yield from self.gate_up.weights((*path, "gate_up"), into, layer, fuse)
        downs = [f"{name}.{expert}.{separate[-1]}.weight" for expert in experts]
        yield from self.down.weights(
            (*path, "down"), downs, layer, convert.stack_linear(inputs=self.width, outputs=self.embed)
        )


def _alone(table: StackedTable, dtype: jnp.dtype) -> StackedTable:
    """Return a layer's table of floats as a stack of its own."""
    here = table.read()
    return StackedTable((here.dequantised(dtype) if is_held(here) else here)[None], jnp.int32(0))


@dataclass(frozen=True)
class SparseNames:
    """A checkpoint's names of the parts of a `SparseMLP`.

    Attributes:
        router, experts, shared: tensors' names after the block's.
        separate: see `ExpertMLPs.weights`.
        correction: name, after the block's, of the bias that corrects the choice; None = after the router's.
        shared_parts: names of the matrices of the MLP that all tokens share, see `GatedMLP.weights`.
    """

    router: str = "gate"
    experts: str = "experts"
    shared: str = "shared_experts"
    separate: tuple[str, str, str] | None = ("gate_proj", "up_proj", "down_proj")
    correction: str | None = None
    shared_parts: tuple[str, ...] = MLP_NAMES


class SharedMLP(GatedMLP):
    """A `GatedMLP` times the sigmoid of one number a token; gate [embed, 1]."""

    def __init__(self, embed: int, width: int, activation: str, build: BuildContext, *, bias: bool = False):
        super().__init__(embed, width, activation, build, bias=bias)
        self.gate = Linear(embed, 1, build, partition=P(None, None))

    def __call__(self, x: Float[Array, "tokens embed"], live_rows: LiveRows = None) -> Float[Array, "tokens embed"]:
        return jax.nn.sigmoid(self.gate(x, live_rows)) * super().__call__(x, live_rows)

    def weights(
        self, path: tuple[str, ...], name: str, layer: int | None, names: tuple[str, ...] = MLP_NAMES
    ) -> Iterator[WeightSource]:
        """Yield the sources of the MLP's tensors and of ``{name}_gate``."""
        yield from super().weights(path, name, layer, names)
        gate = convert.linear(*self.gate.weight.shape[-2:])
        yield from self.gate.weights((*path, "gate"), (f"{name}_gate",), layer, gate, may_quantise=False)


class SparseMLP(nnx.Module):
    """``sum_e share_e * mlp_e(x)`` over the experts that the router picks, plus ``shared(x)`` where all tokens share an
    MLP besides.

    Parameters: router, experts and shared, as their modules say.
    """

    def __init__(
        self, router: Router, experts: ExpertMLPs, shared: GatedMLP | None = None, names: SparseNames | None = None
    ):
        self.router = router
        self.experts = experts
        self.shared = shared
        self.names = names or SparseNames()

    def __call__(self, x: Float[Array, "tokens embed"], live_rows: LiveRows = None) -> Float[Array, "tokens embed"]:
        if self.experts.launches(x):
            out = self.experts.of_dense(x, self.router.dense(x, live_rows))
        else:
            out = self.experts(x, *self.router(x, live_rows))
        return out if self.shared is None else self.shared(x, live_rows) + out

    def weights(self, path: tuple[str, ...], name: str, layer: int) -> Iterator[WeightSource]:
        """Yield the sources of the block `name`, whose parts have the names in `SparseNames`."""
        names = self.names
        correction = None if names.correction is None else f"{name}.{names.correction}"
        yield from self.router.weights((*path, "router"), f"{name}.{names.router}", layer, correction)
        yield from self.experts.weights((*path, "experts"), f"{name}.{names.experts}", layer, names.separate)
        if self.shared is not None:
            yield from self.shared.weights((*path, "shared"), f"{name}.{names.shared}", layer, names.shared_parts)


@dataclass(frozen=True)
class ExpertsSpec:
    """Says what a `SparseMLP` is.

    Attributes:
        count, width: how many experts there are, and how wide each is.
        routing: how a token's experts are chosen.
        corrected: whether a bias corrects the choice, see `Router`.
        shared_width: width of the MLP that all tokens share; 0 = there is none.
        shared_gated: whether that MLP is a `SharedMLP`.
        shared_bias: whether that MLP's projections have biases.
        names: in the checkpoint.
    """

    count: int
    width: int
    routing: Routing
    corrected: bool = False
    shared_width: int = 0
    shared_gated: bool = False
    shared_bias: bool = False
    names: SparseNames = field(default_factory=SparseNames)

    def make(self, embed: int, activation: str, build: BuildContext) -> SparseMLP:
        """Return the block of a layer."""
        layout = ExpertLayout(self.count, build.tensor_parallel, build.expert_parallel)
        shared = SharedMLP if self.shared_gated else GatedMLP
        return SparseMLP(
            Router(embed, self.count, self.routing, build, corrected=self.corrected),
            ExpertMLPs(embed, self.width, activation, build, layout=layout),
            shared(embed, self.shared_width, activation, build, bias=self.shared_bias) if self.shared_width else None,
            self.names,
        )
