"""Builds encoders from an `EncoderSpec`, one description a family; `encoder_families.py` has the descriptions.

An encoder's tokens see their whole prompt, in both directions, and it keeps nothing of a prompt
(`jpaged.model_api.PromptEncoder`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from jpaged.model_api import TENSOR_AXIS, Attend, BuildContext, LayerRef, WeightSource, padded

from . import weights as convert
from .attention import Attention, Heads, ProjectionNames, both_ways
from .dense import MLPSpec
from .layers import FeedForward, GatedMLP, LayerNorm, RMSNorm, check_activation
from .linear import Embedding, LiveRows, in_turn
from .parameters import constant_param
from .rope import Rotary, RotaryTables
from .stack import LayerKind, LayerStack, Shared

ROWS_AT_ONCE = 1 << 13
"""Tokens or patches of which a layer makes heads, and which its MLP widens, at a time: enough to keep any device busy.
The largest picture of Qwen3-VL has 65,536 patches."""

_BERT_PROJECTIONS = ProjectionNames(("self.query", "self.key", "self.value"), "output.dense")


@dataclass(frozen=True)
class EncoderNames:
    """A checkpoint's names, without the prefix of a model with a head; None = there is no such part.

    Attributes:
        words, positions, types, norm: the tables that are added up into a token's first hidden state, and the norm of
            their sum.
        layers: the layers, which a number follows.
        attention: a layer's attention, after the layer's name; `projections` are its matrices.
        attention_norm, mlp_norm: a layer's norms.
        final_norm: the norm of the last hidden states.
        distance_biases: the biases of distances.
    """

    words: str = "embeddings.word_embeddings"
    positions: str | None = "embeddings.position_embeddings"
    types: str | None = "embeddings.token_type_embeddings"
    norm: str = "embeddings.LayerNorm"
    layers: str = "encoder.layer"
    attention: str = "attention"
    projections: ProjectionNames = _BERT_PROJECTIONS
    attention_norm: str = "attention.output.LayerNorm"
    mlp_norm: str = "output.LayerNorm"
    final_norm: str | None = None
    distance_biases: str | None = None


@dataclass(frozen=True)
class EncoderSpec:
    """Describes a family's encoder; the defaults are BERT's.

    Attributes:
        size, num_heads: width of hidden states, and number of heads.
        mlp: see `MLPSpec`.
        eps: epsilon of all norms.
        kinds: each layer's kind: group "full", or "window" for a layer whose tokens see `reach` tokens on each side;
            variant "unnormed" marks a layer that hands attention its hidden states as they are.
        norm: "layer" for LayerNorm, or "rms".
        norm_before: whether norms stand before attention and MLP; else after each addition.
        norm_bias, qkv_bias, out_bias: biases of LayerNorms and of attention's projections.
        position_offset: row of the table of positions for a prompt's first token.
        rotary: each group of layers, with its frequencies; () = they are not rotated.
        norm_of_heads: epsilon of norms of queries and keys, see `Attention`; None = they are not normed.
        scaled_by: the checkpoint's names of vectors that multiply what attention and MLP add; () = there are none.
        distance_buckets: number of learned biases of each head's scores, by buckets of distances that all layers share;
            0 = none.
        names: see `EncoderNames`.
    """

    size: int
    num_heads: int
    mlp: MLPSpec
    eps: float
    kinds: tuple[LayerKind, ...]
    reach: int | None = None
    norm: str = "layer"
    norm_before: bool = False
    norm_bias: bool = True
    qkv_bias: bool = True
    out_bias: bool = True
    position_offset: int = 0
    rotary: tuple[tuple[str, Rotary], ...] = ()
    norm_of_heads: float | None = None
    scaled_by: tuple[str, ...] = ()
    distance_buckets: int = 0
    names: EncoderNames = EncoderNames()

    def make_norm(self, build: BuildContext) -> LayerNorm | RMSNorm:
        """Return a norm of hidden states."""
        if self.norm == "rms":
            return RMSNorm(self.size, self.eps, build)
        return LayerNorm(self.size, self.eps, build, bias=self.norm_bias)


class EncoderLayer(nnx.Module):
    """``x = norm(x + attention(x)); x = norm(x + mlp(x))``, or with the norms before attention and MLP.

    Parameters: attention; attention_norm, unless the kind is "unnormed"; mlp; mlp_norm; attention_scale and mlp_scale
    [embed], where the spec names some.
    """

    def __init__(self, spec: EncoderSpec, kind: LayerKind, heads: Heads, build: BuildContext):
        self.attention_norm = None if kind.variant == "unnormed" else spec.make_norm(build)
        self.attention = Attention(
            spec.size,
            heads,
            build,
            scale=heads.head_dim**-0.5,
            qkv_bias=spec.qkv_bias,
            out_bias=spec.out_bias,
            norm_of_heads=spec.norm_of_heads,
            rotates=bool(spec.rotary),
            rows_at_once=ROWS_AT_ONCE,
        )
        activation, own = check_activation(spec.mlp.activation, "hidden_act"), spec.mlp
        self.mlp: GatedMLP | FeedForward
        if own.gated:
            self.mlp = GatedMLP(spec.size, own.width, activation, build, bias=own.bias, down_bias=own.down_bias)
        else:
            self.mlp = FeedForward(spec.size, own.width, activation, build, bias=own.bias)
        self.mlp_norm = spec.make_norm(build)
        self.attention_scale = constant_param(build, (spec.size,), 1.0) if spec.scaled_by else None
        self.mlp_scale = constant_param(build, (spec.size,), 1.0) if spec.scaled_by else None
        self.spec = spec

    def __call__(
        self, hidden: Float[Array, "tokens embed"], shared: Shared, cache: Any, ref: LayerRef, attend: Attend
    ) -> tuple[Float[Array, "tokens embed"], Any]:
        if self.spec.norm_before:
            inside = hidden if self.attention_norm is None else self.attention_norm(hidden)
            mixed, cache = self.attention(inside, shared, cache, ref, attend)
            hidden = hidden + _times(mixed, self.attention_scale)
            return hidden + _times(self._widened(self.mlp_norm(hidden), shared.live_rows), self.mlp_scale), cache
        mixed, cache = self.attention(hidden, shared, cache, ref, attend)
        assert self.attention_norm is not None, "a layer without a norm is one with norms before its parts"
        hidden = self.attention_norm(hidden + mixed)
        return self.mlp_norm(hidden + self._widened(hidden, shared.live_rows)), cache

    def _widened(self, x: Float[Array, "tokens embed"], live_rows: LiveRows) -> Float[Array, "tokens embed"]:
        """Return what the MLP makes of tokens."""
        return in_turn(self.mlp, ROWS_AT_ONCE, x, live_rows)

    def weights(self, name: str, layer: int) -> Iterator[WeightSource]:
        """Yield the sources of layer number `layer`, whose tensors begin with `name`."""
        names, mlp = self.spec.names, self.spec.mlp
        yield from self.attention.weights(
            ("attention",), f"{name}.{names.attention}", layer, projections=names.projections
        )
        if self.attention_norm is not None:
            yield from self.attention_norm.weights(("attention_norm",), f"{name}.{names.attention_norm}", layer)
        yield from self.mlp.weights(("mlp",), f"{name}.{mlp.block}".rstrip("."), layer, names=mlp.names)
        yield from self.mlp_norm.weights(("mlp_norm",), f"{name}.{names.mlp_norm}", layer)
        for attribute, vector in zip(("attention_scale", "mlp_scale"), self.spec.scaled_by, strict=False):
            yield WeightSource((attribute,), (f"{name}.{vector}",), convert.as_stored, P(None), layer)


def _times(x: Float[Array, "tokens embed"], scale: nnx.Param | None) -> Float[Array, "tokens embed"]:
    return x if scale is None else x * scale[...]


class Encoder(nnx.Module):
    """`jpaged.model_api.PromptEncoder` that a spec describes.

    Parameters: embed_tokens [vocab, embed]; embed_positions and embed_types, those that there are; embed_norm; layers;
    norm where the family has a final one; distance_biases [buckets, heads] where it has them.
    """

    encodes_prompts = True
    layer_groups: tuple[()] = ()

    def __init__(self, config: Any, build: BuildContext, spec: EncoderSpec):
        if build.expert_parallel:
            raise ValueError(f"enable_expert_parallel=True, but {type(self).__name__} has no experts")
        if spec.size % spec.num_heads:
            raise ValueError(f"hidden_size={spec.size} is not a multiple of num_attention_heads={spec.num_heads}")
        rows, whole = padded(config.vocab_size, build.tensor_parallel), P(None, None)
        head_dim = spec.size // spec.num_heads
        heads = Heads.of(spec.num_heads, spec.num_heads, head_dim, build)
        self.vocab_size = config.vocab_size
        self.longest_prompt = config.max_position_embeddings - spec.position_offset
        self.token_types = config.type_vocab_size if spec.names.types is not None else 1
        self.embed_tokens = Embedding(rows, spec.size, build, partition=P(TENSOR_AXIS, None))

        def table(name: str | None, rows: int) -> Embedding | None:
            return None if name is None else Embedding(rows, spec.size, build, partition=whole)

        self.embed_positions = table(spec.names.positions, config.max_position_embeddings)
        self.embed_types = table(spec.names.types, self.token_types)
        self.embed_norm = spec.make_norm(build)
        self.layers = LayerStack(spec.kinds, lambda kind, build: EncoderLayer(spec, kind, heads, build), build)
        self.norm = None if spec.names.final_norm is None else spec.make_norm(build)
        biases = (spec.distance_buckets, spec.num_heads)
        self.distance_biases = constant_param(build, biases) if spec.distance_buckets else None
        self.head_places = heads.layout.q_of_slot
        self.spec = spec

    def __call__(
        self,
        tokens: Int[Array, " tokens"],
        positions: Int[Array, " tokens"],
        cache: Any,
        attend: Attend,
        live_rows: LiveRows = None,
    ) -> tuple[Float[Array, "tokens embed"], Any]:
        hidden = self.embed_norm(self.embed(tokens, positions))
        tables: dict[str, RotaryTables | None] = {kind.group: None for kind in self.spec.kinds if kind.group}
        tables |= {group: rotary.tables(positions) for group, rotary in self.spec.rotary}
        within = both_ways(attend, self.spec.reach, self._bias())
        hidden, cache = self.layers(hidden, Shared(tables, live_rows), cache, within)
        return (hidden if self.norm is None else self.norm(hidden)), cache

    def embed(self, tokens: Int[Array, " tokens"], positions: Int[Array, " tokens"]) -> Float[Array, "tokens embed"]:
        """Return the sum of the tables' rows for each token."""
        hidden = self.embed_tokens(tokens % self.vocab_size)
        if self.embed_types is not None:
            hidden = hidden + self.embed_types(tokens // self.vocab_size)
        if self.embed_positions is not None:
            hidden = hidden + self.embed_positions(positions + self.spec.position_offset)
        return hidden

    def _bias(self) -> Float[Array, "kv_heads q_per_kv distances"] | None:
        """Return the biases of every distance up to the last bucket's, by the places of the heads."""
        if self.distance_biases is None:
            return None
        by_distance = self.distance_biases[...][distance_buckets(self.spec.distance_buckets)]
        places = np.array(self.head_places)
        return jnp.where(places[..., None] < 0, 0, jnp.moveaxis(by_distance, 1, 0)[places])

    def weights(self) -> Iterator[WeightSource]:
        names = self.spec.names
        rows = convert.vocab_rows(self.vocab_size, self.embed_tokens.weight.shape[0])
        yield from self.embed_tokens.weights(("embed_tokens",), names.words, rows)
        tables = {"embed_positions": names.positions, "embed_types": names.types}
        for attribute, name in tables.items():
            if name is not None:
                table = getattr(self, attribute)
                yield from table.weights((attribute,), name, convert.as_stored, may_quantise=False)
        yield from self.embed_norm.weights(("embed_norm",), names.norm)
        for number in range(len(self.layers.kinds)):
            yield from self.layers.layer(number).weights(f"{names.layers}.{number}", number)
        if self.distance_biases is not None:
            yield WeightSource(
                ("distance_biases",), (f"{names.distance_biases}.weight",), convert.as_stored, P(None, None)
            )
        if self.norm is not None:
            assert names.final_norm is not None
            yield from self.norm.weights(("norm",), names.final_norm)

    def locate(self, source: WeightSource) -> tuple[tuple[str | int, ...], int | None]:
        return self.layers.locate(source, "layers")


FARTHEST = 128
"""The distance from which on all keys are in one bucket."""


def distance_buckets(number: int) -> Int[np.ndarray, " distances"]:
    """Return the bucket of each distance from -`FARTHEST` to `FARTHEST`, a key's place less its query's (T5; Raffel et
    al., 2020): one for each small distance, wider and wider ones for larger, half of them for later keys."""
    half = number // 2
    distance = np.arange(-FARTHEST, FARTHEST + 1)
    far, exact = np.abs(distance), half // 2
    ratio = np.log(np.maximum(far, 1).astype(np.float32) / exact) / np.float32(np.log(FARTHEST / exact))
    large = np.minimum(exact + (ratio * (half - exact)).astype(np.int32), half - 1)
    return np.where(far < exact, far, large) + half * (distance > 0)
