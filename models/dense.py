"""Builds decoders from a `DecoderSpec`, one description a family; `families.py` has the descriptions.

A spec says what differs between decoders: where norms stand, which of them and of the projections have biases, what is
rotated, the MLP or experts, multipliers, and the checkpoint's names. A family that needs more than a field here keeps a
file of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from flax import nnx
from jaxtyping import Array, Float, Int

from jpaged.model_api import Attend, BuildContext, LayerRef, WeightSource

from .attention import Attention, Heads, ProjectionNames
from .decoder import Decoder
from .experts import ExpertsSpec, SparseMLP
from .groups import layer_groups, type_of_group
from .heads_norm import EachHeadNorm
from .layers import MLP_NAMES, XIELU, FeedForward, GatedMLP, LayerNorm, RMSNorm, check_activation, scaled
from .linear import LiveRows
from .rope import QueryGrowth, Rotary, rotary_from_config
from .stack import LayerKind, MakeLayer, PendingResidual, Shared

Norm = RMSNorm | LayerNorm


@dataclass(frozen=True)
class NormNames:
    """A checkpoint's names of a layer's norms, after the layer's own name; None = there is no such norm.

    A parallel layer without a norm before its MLP hands the MLP what attention reads.
    """

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None


@dataclass(frozen=True)
class QKNorm:
    """Says how queries and keys are normed.

    Attributes:
        kind: "rms" norms each head by one scale; "layer" the same by a LayerNorm with a bias; "layer_each" by a
            LayerNorm without bias that has a scale for each head; "rms_all" norms all heads of a token together.
        names: the checkpoint's names of the two norms. Where they end in ``.{head}``, each head has a tensor.
        after_rotation: whether norms follow the rotation.
    """

    kind: Literal["rms", "layer", "layer_each", "rms_all"] = "rms"
    names: tuple[str, str] = ("q_norm", "k_norm")
    after_rotation: bool = False


@dataclass(frozen=True)
class MLPSpec:
    """Says what a layer's MLP is.

    Attributes:
        activation: by the name that configs use.
        names: of the matrices, after the block's: gate, up and down; or gate and up in one, and down. Without a gate,
            up and down.
        block: the block's name after the layer's.
        down_bias: of a gated encoder's MLP, see `GatedMLP`.
    """

    width: int
    activation: str
    bias: bool = False
    gated: bool = True
    names: tuple[str, ...] = MLP_NAMES
    block: str = "mlp"
    down_bias: bool | None = None


@dataclass(frozen=True)
class DecoderSpec:
    """Describes a family's decoder; the defaults are Llama's.

    Attributes:
        mlp: see `MLPSpec`.
        eps: epsilon of all norms.
        kinds: each layer's kind; variant "still" marks a layer that rotates nothing, "experts" one that has experts
            in the place of the MLP.
        experts: of the layers that have some.
        norm: "rms", or "layer" for LayerNorm.
        norm_offset: added to the scales of norms.
        norm_bias: whether LayerNorms have biases.
        norms: which norms a layer has.
        parallel: whether attention and MLP read the same hidden states and are added together.
        qkv_bias, out_bias: biases of attention's projections.
        qk_norm: norms of queries and keys; None = none.
        attention, projections: names of a layer's attention and of its projections.
        scale: of queries' products with keys; None = ``head_dim ** -0.5``.
        still_groups: groups of layers that rotate nothing.
        rotates_neighbours: whether rotation turns pairs (2i, 2i + 1) of a head.
        partial_rotary: whether the config may rotate a part of each head.
        rotary_by_type: whether the config has rotary parameters for each type of layer.
        growth: how queries grow with their position.
        embed_factor: multiplies the rows of the embedding, see `jpaged.model_api.ScalesEmbedding`.
        embed_scale, residual_scale, logit_scale: multiply what is embedded, the results of attention and MLP, the
            logits.
        head_bias: whether the vocabulary's head has a bias.
        head_name, prefix, embed_name, norm_name: names of the head, the decoder, its embedding and its final norm.
    """

    mlp: MLPSpec
    eps: float
    kinds: tuple[LayerKind, ...]
    experts: ExpertsSpec | None = None
    norm: Literal["rms", "layer"] = "rms"
    norm_offset: float = 0.0
    norm_bias: bool = True
    norms: NormNames = NormNames()
    parallel: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: QKNorm | None = None
    attention: str = "self_attn"
    projections: ProjectionNames = field(default_factory=ProjectionNames)
    scale: float | None = None
    still_groups: tuple[str, ...] = ()
    rotates_neighbours: bool = False
    partial_rotary: bool = False
    rotary_by_type: bool = False
    growth: QueryGrowth | None = None
    embed_factor: float = 1.0
    embed_scale: float | None = None
    residual_scale: float = 1.0
    logit_scale: float | None = None
    head_bias: bool = False
    head_name: str = "lm_head"
    prefix: str = "model"
    embed_name: str = "embed_tokens"
    norm_name: str = "norm"

    def make_norm(self, size: int, build: BuildContext) -> Norm:
        """Return a norm of hidden states."""
        if self.norm == "rms":
            return RMSNorm(size, self.eps, build, offset=self.norm_offset)
        return LayerNorm(size, self.eps, build, bias=self.norm_bias, offset=self.norm_offset)


class DenseLayer(nnx.Module):
    """``x += after(attention(before(x))); x += after(mlp(before(x)))``, or both of the same `x`, with the norms that
    the spec has.

    Parameters: input_norm, post_attention_norm, post_norm (before the MLP) and post_mlp_norm, those that there are;
    attention; mlp.
    """

    takes_pending_residual = True

    def __init__(self, spec: DecoderSpec, size: int, kind: LayerKind, heads: Heads, build: BuildContext):
        def norm(name: str | None) -> Norm | None:
            return None if name is None else spec.make_norm(size, build)

        self.input_norm = norm(spec.norms.before_attention)
        self.post_attention_norm = norm(spec.norms.after_attention)
        self.post_norm = norm(spec.norms.before_mlp)
        self.post_mlp_norm = norm(spec.norms.after_mlp)
        self.attention = Attention(
            size,
            heads,
            build,
            scale=heads.head_dim**-0.5 if spec.scale is None else spec.scale,
            qkv_bias=spec.qkv_bias,
            out_bias=spec.out_bias,
            qk_norm=_head_norm(spec, heads, build),
            norm_of_heads=spec.eps if spec.qk_norm is not None and spec.qk_norm.kind == "rms_all" else None,
            norms_after_rotation=spec.qk_norm is not None and spec.qk_norm.after_rotation,
            rotates=kind.variant != "still",
        )
        activation = spec.mlp.activation
        if spec.mlp.gated or activation != XIELU.name:
            check_activation(activation, "hidden_act")
        self.mlp: GatedMLP | FeedForward | SparseMLP
        if kind.variant == "experts":
            assert spec.experts is not None
            self.mlp = spec.experts.make(size, activation, build)
        else:
            mlp = GatedMLP if spec.mlp.gated else FeedForward
            self.mlp = mlp(size, spec.mlp.width, activation, build, bias=spec.mlp.bias)
        self.spec = spec

    def __call__(
        self,
        hidden: PendingResidual | Float[Array, "tokens embed"],
        shared: Shared,
        cache: Any,
        ref: LayerRef,
        attend: Attend,
    ) -> tuple[PendingResidual, Any]:
        hidden, normed = _entered(hidden, self.input_norm)
        mixed, cache = self.attention(normed, shared, cache, ref, attend)
        mixed = self._left(mixed, self.post_attention_norm)
        if self.spec.parallel:
            inside = normed if self.post_norm is None else self.post_norm(hidden)
        else:
            hidden, inside = _entered(PendingResidual(hidden, mixed), self.post_norm)
        out = self._left(self.mlp(inside, shared.read_rows), self.post_mlp_norm)
        return PendingResidual(hidden, mixed + out if self.spec.parallel else out), cache

    def _left(self, out: Array, norm: Norm | None) -> Array:
        """Return what a block adds to the residual stream."""
        if norm is not None:
            out = norm.of_whole(out) if isinstance(norm, RMSNorm) else norm(out)
        return scaled(out, self.spec.residual_scale)

    def weights(self, name: str, layer: int) -> Iterator[WeightSource]:
        """Yield the sources of layer number `layer`, whose tensors begin with `name`."""
        spec = self.spec
        norms = {
            "input_norm": spec.norms.before_attention,
            "post_attention_norm": spec.norms.after_attention,
            "post_norm": spec.norms.before_mlp,
            "post_mlp_norm": spec.norms.after_mlp,
        }
        for attribute, tensor in norms.items():
            if tensor is not None:
                yield from getattr(self, attribute).weights((attribute,), f"{name}.{tensor}", layer)
        names = ("q_norm", "k_norm") if spec.qk_norm is None else spec.qk_norm.names
        yield from self.attention.weights(
            ("attention",), f"{name}.{spec.attention}", layer, norm_names=names, projections=spec.projections
        )
        block = f"{name}.{spec.mlp.block}".rstrip(".")
        if isinstance(self.mlp, SparseMLP):
            yield from self.mlp.weights(("mlp",), block, layer)
        else:
            yield from self.mlp.weights(("mlp",), block, layer, names=spec.mlp.names)


def _entered(hidden: PendingResidual | Array, norm: Norm | None) -> tuple[Array, Array]:
    """Return the hidden states, added up, and what a block reads of them."""
    if isinstance(norm, RMSNorm):
        total, normed = norm.norm_residual(hidden)
        return total, normed
    total = hidden.hidden + hidden.rest if isinstance(hidden, PendingResidual) else hidden
    return total, total if norm is None else norm(total)


def _head_norm(spec: DecoderSpec, heads: Heads, build: BuildContext) -> Callable[..., Any] | None:
    """Return what makes a norm of queries or keys, see `Attention`."""
    kind, size = None if spec.qk_norm is None else spec.qk_norm.kind, heads.head_dim
    if kind == "rms":
        return partial(RMSNorm, size, spec.eps, build)
    if kind == "layer":
        return partial(LayerNorm, size, spec.eps, build)
    if kind == "layer_each":
        return EachHeadNorm.maker(size, spec.eps, build, rotates_neighbours=spec.rotates_neighbours)
    return None


@dataclass(frozen=True)
class DenseParts:
    """Holds what the layers of a spec's decoder are built of.

    Attributes:
        rotary: returns a group's rotary frequencies, by its name; None for a group that knows no positions.
        make: builds a layer.
    """

    heads: Heads
    rotary: Callable[[str], Rotary | None]
    make: MakeLayer

    @classmethod
    def of(cls, config: Any, build: BuildContext, spec: DecoderSpec) -> DenseParts:
        """Return the parts of a decoder with this config."""
        size = config.hidden_size
        head_dim = getattr(config, "head_dim", None) or size // config.num_attention_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads

        def rotary(group: str) -> Rotary | None:
            if group in spec.still_groups:
                return None
            layer_type = type_of_group(group) if spec.rotary_by_type else None
            return rotary_from_config(config, head_dim, layer_type, partial=spec.partial_rotary, longest=build.longest)

        first = rotary(spec.kinds[0].group or "full")
        heads = Heads.of(
            config.num_attention_heads,
            kv_heads,
            head_dim,
            build,
            rotates_neighbours=spec.rotates_neighbours,
            rotated=None if first is None else 2 * len(first.frequencies),
        )

        def make(kind: LayerKind, build: BuildContext) -> DenseLayer:
            return DenseLayer(spec, size, kind, heads, build)

        return cls(heads, rotary, make)


class DenseDecoder(Decoder):
    """`jpaged.model_api.CausalLM` that a spec describes."""

    reads_separate_experts = True
    """Reads each expert's tensors by names of their own; a checkpoint may hold those of all experts in one."""

    def __init__(self, config: Any, build: BuildContext, spec: DecoderSpec):
        parts = DenseParts.of(config, build, spec)
        layout, window = parts.heads.layout, getattr(config, "sliding_window", None)
        groups = layer_groups(spec.kinds, layout.kv_heads, parts.heads.head_dim, window, q_per_kv=layout.q_per_kv)
        self._prefix, self._head_name = spec.prefix, spec.head_name
        self._embed_name, self._norm_name = spec.embed_name, spec.norm_name
        self._has_experts = any(kind.variant == "experts" for kind in spec.kinds)
        super().__init__(
            config,
            build,
            spec.kinds,
            parts.make,
            groups=groups,
            rotary={group.name: parts.rotary(group.name) for group in groups},
            norm=spec.make_norm(config.hidden_size, build),
            embed_factor=spec.embed_factor,
            logit_scale=spec.logit_scale,
            head_bias=spec.head_bias,
        )
        self.spec = spec
        self.skips_unread_rows = build.product_impl == "cpu" and not self.encodes(config)

    def embed(
        self, tokens: Int[Array, " tokens"], positions: Int[Array, " tokens"], live_rows: LiveRows = None
    ) -> Float[Array, "tokens embed"]:
        return scaled(super().embed(tokens, positions, live_rows), self.spec.embed_scale)

    def shared(self, positions: Int[Array, " tokens"], live_rows: LiveRows) -> Shared:
        shared = super().shared(positions, live_rows)
        if self.spec.growth is None:
            return shared
        factors = self.spec.growth.factors(positions)
        return replace(shared, growth={group.name: factors for group in self.layer_groups})
