"""Mamba-2 (Dao & Gu, 2024; Codestral Mamba): recurrent layers only, so no layer keeps tokens and no MLP follows one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jpaged.model_api import Attend, BuildContext, LayerRef, Recur, WeightSource

from .config_reader import ConfigReader, Fields
from .decoder import Decoder, check_model_type
from .groups import state_groups
from .layers import RMSNorm
from .linear import LiveRows
from .recurrent.convolution import check_silu
from .recurrent.mamba2 import Mamba2, Mamba2Sizes
from .recurrent.slots import Slots
from .stack import LayerKind, Shared


class Mamba2Layer(nnx.Module):
    """``x += mixer(norm(x))``; the residual stream may be wider than the parameters."""

    def __init__(self, config: Any, sizes: Mamba2Sizes, build: BuildContext):
        self.norm = RMSNorm(config.hidden_size, config.layer_norm_epsilon, build)
        self.mixer = Mamba2(sizes, build)
        self.dtype = build.dtype

    def __call__(
        self, hidden: Float[Array, "tokens embed"], shared: Shared, cache: Any, ref: LayerRef, attend: Recur
    ) -> tuple[Float[Array, "tokens embed"], Any]:
        mixed, cache = self.mixer(self.norm(hidden.astype(self.dtype)), shared, cache, ref, attend)
        return hidden + mixed, cache

    def weights(self, name: str, layer: int) -> Iterator[WeightSource]:
        """Yield the sources of layer number `layer`, whose tensors begin with `name`."""
        yield from self.norm.weights(("norm",), f"{name}.norm", layer)
        yield from self.mixer.weights(("mixer",), f"{name}.mixer", layer)


def _follow(fields: Fields) -> None:
    """Let every layer be a recurrence, and check the sizes. Heads of a null width share the inner width.

    Raises:
        ValueError: heads do not make up the inner width.
    """
    inner, heads = fields["hidden_size"] * fields["expand"], fields["num_heads"]
    if fields["head_dim"] is None:
        fields["head_dim"] = inner // heads
    head_dim = fields["head_dim"]
    if inner != heads * head_dim:
        raise ValueError(f"hidden_size * expand = {inner} is not num_heads={heads} * head_dim={head_dim}")
    fields["layer_types"] = ["linear_attention"] * fields["num_hidden_layers"]


_CONFIGS = {
    "mamba2": ConfigReader(
        {
            "num_heads": 128,
            "head_dim": 64,
            "vocab_size": 32768,
            "hidden_size": 4096,
            "state_size": 128,
            "num_hidden_layers": 64,
            "layer_norm_epsilon": 1e-05,
            "pad_token_id": 1,
            "bos_token_id": 0,
            "eos_token_id": 2,
            "expand": 2,
            "conv_kernel": 4,
            "n_groups": 8,
            "use_bias": False,
            "use_conv_bias": True,
            "hidden_act": "silu",
            "residual_in_fp32": True,
            "time_step_limit": (0.0, float("inf")),
            "tie_word_embeddings": False,
        },
        rope=None,
        follow=_follow,
    ),
}
"""Reads the configs, by ``model_type``."""


class Mamba2LM(Decoder):
    """`jpaged.model_api.CausalLM` for Mamba-2; `config` is a Hugging Face ``Mamba2Config``."""

    configs = _CONFIGS

    _prefix = "backbone"
    _embed_name = "embeddings"
    _norm_name = "norm_f"

    def __init__(self, config: Any, build: BuildContext):
        check_model_type(config, ("mamba2",))
        check_silu(config.hidden_act)
        sizes = Mamba2Sizes(
            embed=config.hidden_size,
            head_dim=config.head_dim,
            state=config.state_size,
            conv_width=config.conv_kernel,
            conv_bias=config.use_conv_bias,
            proj_bias=config.use_bias,
            eps=config.layer_norm_epsilon,
            step_limits=tuple(config.time_step_limit),
            slots=Slots.of(config.num_heads, config.n_groups, build.tensor_parallel, "num_heads and n_groups"),
        )
        kinds = (LayerKind("state"),) * config.num_hidden_layers

        def make(kind: LayerKind, build: BuildContext) -> Mamba2Layer:
            return Mamba2Layer(config, sizes, build)

        super().__init__(
            config,
            build,
            kinds,
            make,
            groups=state_groups(kinds, sizes.state_parts(build)),
            rotary={},
            norm=RMSNorm(config.hidden_size, config.layer_norm_epsilon, build),
        )
        self.residual_dtype = jnp.dtype(jnp.float32) if config.residual_in_fp32 else build.dtype
        self.dtype = build.dtype

    def embed(
        self, tokens: Int[Array, " tokens"], positions: Int[Array, " tokens"], live_rows: LiveRows = None
    ) -> Float[Array, "tokens embed"]:
        return super().embed(tokens, positions, live_rows).astype(self.residual_dtype)

    def __call__(
        self,
        tokens: Int[Array, " tokens"],
        positions: Int[Array, " tokens"],
        cache: Any,
        attend: Attend,
        live_rows: LiveRows = None,
        read: Bool[Array, " tokens"] | None = None,
    ) -> tuple[Float[Array, "tokens embed"], Any]:
        hidden, cache = super().__call__(tokens, positions, cache, attend, live_rows, read)
        return hidden.astype(self.dtype), cache
