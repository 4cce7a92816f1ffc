"""Llama 4, text only (Meta, 2025): layers that see a chunk of the sequence, and global ones that know no positions.

Chunked layers rotate neighbouring pairs and may norm queries and keys; in global layers queries grow slowly with
their position, so that attention stays sharp over long contexts (Nakanishi, 2025). Some or all layers have a
mixture of experts beside a shared MLP instead of an MLP.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jpaged.model_api import Attend, LayerRef, WeightSource

from .attention import Attention, Heads
from .decoder import Decoder, check_model_type
from .experts import Experts
from .groups import kinds_from_types, layer_groups
from .layers import GatedMLP, RMSNorm, check_activation
from .mixture import ExpertLayout
from .rope import rotary_from_config
from .stack import LayerKind


class Llama4Layer(nnx.Module):
    """``x += attention(norm(x)); x += mlp(norm(x))``, the MLP with or without experts beside it."""

    def __init__(
        self,
        config: Any,
        kind: LayerKind,
        heads: Heads,
        *,
        layout: ExpertLayout,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        size, eps = config.hidden_size, config.rms_norm_eps
        activation = check_activation(config.hidden_act, "hidden_act")
        mixed = kind.variant == "experts"
        qk_norm = partial(RMSNorm, heads.head_dim, eps, dtype=dtype, affine=False)
        self.input_norm = RMSNorm(size, eps, dtype=dtype)
        self.attention = Attention(
            size,
            heads,
            scale=heads.head_dim**-0.5,
            qkv_bias=config.attention_bias,
            out_bias=config.attention_bias,
            qk_norm=qk_norm if config.use_qk_norm and kind.group == "chunk" else None,
            dtype=dtype,
            rngs=rngs,
        )
        self.post_norm = RMSNorm(size, eps, dtype=dtype)
        self.mlp = GatedMLP(
            size,
            config.intermediate_size if mixed else config.intermediate_size_mlp,
            activation,
            bias=False,
            tensor_parallel=layout.devices,
            dtype=dtype,
            rngs=rngs,
        )
        self.experts = (
            Experts(
                size,
                config.intermediate_size,
                activation,
                layout=layout,
                per_token=config.num_experts_per_tok,
                dtype=dtype,
                rngs=rngs,
            )
            if mixed
            else None
        )

    def __call__(
        self, hidden: Float[Array, "tokens embed"], shared: Any, cache: Any, ref: LayerRef, attend: Attend
    ) -> tuple[Float[Array, "tokens embed"], Any]:
        tables, growth = shared[ref.group]
        mixed, cache = self.attention(self.input_norm(hidden), tables, cache, ref, attend, growth)
        hidden = hidden + mixed
        inside = self.post_norm(hidden)
        out = self.mlp(inside)
        return hidden + (out if self.experts is None else out + self.experts(inside)), cache

    def weights(self, name: str, layer: int) -> Iterator[WeightSource]:
        """Sources of layer number `layer`, whose tensors begin with `name`."""
        yield from self.input_norm.weights(("input_norm",), f"{name}.input_layernorm", layer)
        yield from self.attention.weights(("attention",), f"{name}.self_attn", layer)
        yield from self.post_norm.weights(("post_norm",), f"{name}.post_attention_layernorm", layer)
        block = f"{name}.feed_forward"
        if self.experts is None:
            yield from self.mlp.weights(("mlp",), block, layer)
        else:
            yield from self.mlp.weights(("mlp",), f"{block}.shared_expert", layer)
            yield from self.experts.weights(("experts",), block, layer)


class Llama4(Decoder):
    """`jpaged.model_api.CausalLM` for Llama 4's text model; `config` is a Hugging Face ``Llama4TextConfig``."""

    def __init__(
        self,
        config: Any,
        *,
        dtype: jnp.dtype,
        tensor_parallel: int = 1,
        expert_parallel: bool = False,
        stacked: bool = False,
        rngs: nnx.Rngs,
    ):
        """Random weights; wrap in ``nnx.eval_shape`` for shapes only.

        Raises:
            ValueError: naming the config's field that asks for what is not implemented; or see `ExpertLayout`.
        """
        check_model_type(config, ("llama4_text",))
        heads = Heads.of(
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            tensor_parallel,
            rotates_neighbours=True,
        )
        groups = kinds_from_types(config, local="chunked_attention")
        if [bool(rotates) for rotates in config.no_rope_layers] != [kind.group == "chunk" for kind in groups]:
            raise ValueError(
                f"no_rope_layers={config.no_rope_layers} is not supported with layer_types={config.layer_types}: "
                "chunked layers must rotate, the others must not"
            )
        mixed = ["experts" if number in config.moe_layers else "dense" for number in range(len(groups))]
        kinds = tuple(LayerKind(kind.group, variant) for kind, variant in zip(groups, mixed, strict=True))
        rotary = rotary_from_config(config, config.head_dim)
        if expert_parallel and not config.moe_layers:
            raise ValueError(f"enable_expert_parallel=True, but moe_layers={config.moe_layers}: there are no experts")
        layout = ExpertLayout(config.num_local_experts, tensor_parallel, expert_parallel)

        def make(kind: LayerKind, rngs: nnx.Rngs) -> Llama4Layer:
            return Llama4Layer(config, kind, heads, layout=layout, dtype=dtype, rngs=rngs)

        super().__init__(
            config,
            kinds,
            make,
            groups=layer_groups(
                kinds, heads.layout.kv_heads, config.head_dim, attention_chunk_size=config.attention_chunk_size
            ),
            rotary={"chunk": rotary, "full": None},
            norm=RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype),
            dtype=dtype,
            tensor_parallel=tensor_parallel,
            stacked=stacked,
            rngs=rngs,
        )
        self.growth = (config.floor_scale, config.attn_scale) if config.attn_temperature_tuning else None

    def shared(self, positions: Int[Array, " tokens"]) -> dict[str, Any]:
        """Of each group: rotary tables, and what its queries are multiplied by."""
        growth = None
        if self.growth is not None:
            every, strength = self.growth
            steps = jnp.floor((positions.astype(jnp.float32) + 1) / every)
            growth = 1 + strength * jnp.log1p(steps)
        tables = super().shared(positions)
        return {"chunk": (tables["chunk"], None), "full": (tables["full"], growth)}
