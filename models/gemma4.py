"""Gemma 4's text models (Gemma Team, 2026): local and global layers with heads of different widths and numbers.

Besides the hidden state, every layer gets a small vector for each token, from its own table (per-layer embeddings).
The last layers may keep no KV and read that of the last layer of their type that does. Global layers may use their keys
as values, and rotate a part of a head. Some models have experts next to the MLP.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from jpaged.model_api import (
    TENSOR_AXIS,
    BuildContext,
    LayerGroup,
    WeightSource,
    padded,
)

from . import weights as convert
from .attention import Heads
from .decoder import Decoder, check_model_type
from .gemma4_assistant import Gemma4AssistantHead, is_assistant
from .gemma4_layer import Gemma4Layer, heads_of_groups, own_width
from .groups import KVSize, kinds_from_types, sized_groups, type_of_group
from .layers import RMSNorm
from .linear import Embedding, Linear, LiveRows
from .mixture import ExpertLayout
from .rope import rotary_from_config
from .stack import LayerKind


class OwnInputs(nnx.Module):
    """Makes each layer's input of a token: half from a table, half from the token's hidden state.

    table [vocab, layers * width]; projection [embed, layers * width]; norm over width.
    """

    def __init__(self, config: Any, build: BuildContext):
        self.layers, self.width = config.num_hidden_layers, config.hidden_size_per_layer_input
        columns, self.vocab = self.layers * self.width, config.vocab_size_per_layer_input
        rows = padded(self.vocab, build.tensor_parallel)
        self.table = Embedding(rows, columns, build, partition=P(TENSOR_AXIS, None))
        self.projection = Linear(config.hidden_size, columns, build, partition=P(None, None))
        self.norm = RMSNorm(self.width, config.rms_norm_eps, build)

    def __call__(
        self, tokens: Int[Array, " tokens"], hidden: Float[Array, "tokens embed"], live_rows: LiveRows
    ) -> Float[Array, "layers tokens width"]:
        shape = len(tokens), self.layers, self.width
        projected = self.projection(hidden, live_rows) * jnp.asarray(hidden.shape[-1] ** -0.5, hidden.dtype)
        looked_up = self.table(tokens) * jnp.asarray(self.width**0.5, hidden.dtype)
        both = self.norm(projected.reshape(shape)) + looked_up.reshape(shape)
        return (both * jnp.asarray(2**-0.5, hidden.dtype)).swapaxes(0, 1)

    def weights(self, path: tuple[str, ...], name: str) -> Iterator[WeightSource]:
        """Yield the sources of the model `name`'s tensors that have to do with the layers' own inputs."""
        rows, columns = self.table.weight.shape
        matrix = convert.linear(self.projection.weight.shape[0], columns)
        tensor = (f"{name}.per_layer_model_projection",)
        by_row = convert.vocab_rows(self.vocab, rows)
        yield from self.table.weights((*path, "table"), f"{name}.embed_tokens_per_layer", by_row)
        yield from self.projection.weights((*path, "projection"), tensor, None, matrix)
        yield from self.norm.weights((*path, "norm"), f"{name}.per_layer_projection_norm")


class Gemma4(Decoder):
    """`jpaged.model_api.CausalLM`; `config` is a Hugging Face ``Gemma4TextConfig``, or ``Gemma4UnifiedTextConfig``,
    which has neither experts nor per-layer inputs."""

    _has_experts = True

    def __init__(self, config: Any, build: BuildContext):
        check_model_type(config, ("gemma4_text", "gemma4_unified_text"))
        has_experts = getattr(config, "enable_moe_block", False)
        if config.use_bidirectional_attention == "all":
            raise ValueError("use_bidirectional_attention='all' is not supported: attention is causal")
        if build.expert_parallel and not has_experts:
            raise ValueError("enable_expert_parallel=True, but enable_moe_block=False: there are no experts")
        kinds = _kinds(config)
        heads = heads_of_groups(config, kinds, build)
        layout = None
        if has_experts:
            layout = ExpertLayout(config.num_experts, build.tensor_parallel, build.expert_parallel)

        def make(kind: LayerKind, build: BuildContext) -> Gemma4Layer:
            return Gemma4Layer(config, kind, heads[kind.group or ""], layout, build)

        super().__init__(
            config,
            build,
            kinds,
            make,
            groups=_groups(config, kinds, heads),
            rotary={name: rotary_from_config(config, own.head_dim, type_of_group(name)) for name, own in heads.items()},
            norm=RMSNorm(config.hidden_size, config.rms_norm_eps, build),
            embed_factor=config.hidden_size**0.5,
            logit_soft_cap=config.final_logit_softcapping,
        )
        self.own_inputs = OwnInputs(config, build) if own_width(config) else None

    def per_layer(
        self, tokens: Int[Array, " tokens"], hidden: Float[Array, "tokens embed"], live_rows: LiveRows
    ) -> Float[Array, "layers tokens width"] | None:
        return None if self.own_inputs is None else self.own_inputs(tokens, hidden, live_rows)

    @staticmethod
    def draft_head(config: Any, build: BuildContext) -> Gemma4AssistantHead:
        """See `jpaged.model_api.HasDraftHead`; the config is an assistant's."""
        if not is_assistant(config):
            raise ValueError("Gemma4 has no head that predicts further tokens; an assistant has a folder of its own")
        return Gemma4AssistantHead(config, build)

    def weights(self) -> Iterator[WeightSource]:
        yield from super().weights()
        if self.own_inputs is not None:
            yield from self.own_inputs.weights(("own_inputs",), self._prefix)


def _kinds(config: Any) -> tuple[LayerKind, ...]:
    """Return the layers' kinds: the last ``num_kv_shared_layers`` read the KV of others."""
    kinds, keeping = kinds_from_types(config), config.num_hidden_layers - config.num_kv_shared_layers
    kept = {kind.group for kind in kinds[: max(keeping, 0)]}
    if kept != {kind.group for kind in kinds}:
        raise ValueError(
            f"num_kv_shared_layers={config.num_kv_shared_layers} of {len(kinds)} layers leaves a type of layer_types "
            "without a layer that keeps KV"
        )
    return tuple(replace(kind, shares_kv=number >= keeping) for number, kind in enumerate(kinds))


def _groups(config: Any, kinds: tuple[LayerKind, ...], heads: Mapping[str, Heads]) -> tuple[LayerGroup, ...]:
    def size(group: str) -> KVSize:
        layout = heads[group].layout
        return KVSize(layout.kv_heads, heads[group].head_dim, layout.q_per_kv)

    return sized_groups(kinds, size, config.sliding_window)
