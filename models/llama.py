"""Llama 2 and 3, SmolLM2, Mistral, Ministral, Qwen2 and Qwen3: one decoder with a few switches.

Pre-norm RMSNorm, rotary grouped-query attention, gated MLP (Touvron et al., 2023). Mistral slides a window
over every layer, Ministral over most, Qwen2 has biases on Q, K and V, Qwen3 norms queries and keys. Any of them
may share KV across layers: with ``use_cla`` (Tencent's name for it) `share_kv` says which layers keep KV, by
``cla_share_factor``, and the others have no weights for K and V.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from flax import nnx
from jaxtyping import Array, Float

from jpaged.model_api import Attend, BuildContext, LayerRef, WeightSource

from .attention import Attention, Heads
from .config_reader import ConfigReader, Fields, dense, windows_after
from .decoder import Decoder, check_model_type
from .dflash import DFlashHead, is_dflash_drafter
from .eagle3 import Eagle3Head, is_eagle3_head
from .groups import kinds_from_types, layer_groups, share_kv
from .layers import GatedMLP, RMSNorm, check_activation
from .rope import rotary_from_config
from .stack import LayerKind, PendingResidual, Shared

_MODEL_TYPES = ("llama", "mistral", "ministral", "qwen2", "qwen3")


def _kinds(config: Any) -> tuple[LayerKind, ...]:
    """Return each layer's kind: full attention (Llama), one window for all (Mistral), or as listed (Ministral,
    Qwen)."""
    if config.model_type in ("ministral", "qwen2", "qwen3"):
        kinds = kinds_from_types(config)
    else:
        slides = config.model_type == "mistral" and config.sliding_window is not None
        kinds = (LayerKind("window" if slides else "full"),) * config.num_hidden_layers
    return share_kv(kinds, getattr(config, "cla_share_factor", None)) if getattr(config, "use_cla", False) else kinds


class LlamaLayer(nnx.Module):
    """``x += attention(norm(x)); x += mlp(norm(x))``."""

    takes_pending_residual = True

    def __init__(self, config: Any, kind: LayerKind, heads: Heads, build: BuildContext):
        # Qwen2 fixes its biases in code; Mistral and Ministral have none; the others have a field for all four.
        bias = config.model_type in ("llama", "qwen3") and config.attention_bias
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_norm = RMSNorm(size, eps, build)
        self.attention = Attention(
            size,
            heads,
            build,
            scale=heads.head_dim**-0.5,
            qkv_bias=bias or config.model_type == "qwen2",
            out_bias=bias,
            qk_norm=partial(RMSNorm, heads.head_dim, eps, build) if config.model_type == "qwen3" else None,
            shares_kv=kind.shares_kv,
        )
        self.post_norm = RMSNorm(size, eps, build)
        self.mlp = GatedMLP(
            size,
            config.intermediate_size,
            check_activation(config.hidden_act, "hidden_act"),
            build,
            bias=config.model_type == "llama" and config.mlp_bias,
        )

    def __call__(
        self,
        hidden: PendingResidual | Float[Array, "tokens embed"],
        shared: Shared,
        cache: Any,
        ref: LayerRef,
        attend: Attend,
    ) -> tuple[PendingResidual, Any]:
        hidden, normed = self.input_norm.norm_residual(hidden)
        mixed, cache = self.attention(normed, shared, cache, ref, attend)
        hidden, normed = self.post_norm.norm_residual(PendingResidual(hidden, mixed))
        return PendingResidual(hidden, self.mlp(normed, shared.read_rows)), cache

    def weights(self, name: str, layer: int) -> Iterator[WeightSource]:
        """Yield the sources of layer number `layer`, whose tensors begin with `name`."""
        yield from self.input_norm.weights(("input_norm",), f"{name}.input_layernorm", layer)
        yield from self.attention.weights(("attention",), f"{name}.self_attn", layer)
        yield from self.post_norm.weights(("post_norm",), f"{name}.post_attention_layernorm", layer)
        yield from self.mlp.weights(("mlp",), f"{name}.mlp", layer)


def _ministral(fields: Fields) -> None:
    """Let all layers slide where a file does not list them, if there is a window."""
    if fields["layer_types"] is None:
        kind = "full_attention" if fields["sliding_window"] is None else "sliding_attention"
        fields["layer_types"] = [kind] * fields["num_hidden_layers"]


_CONFIGS = {
    "llama": ConfigReader(
        dense(
            vocab_size=32000,
            intermediate_size=11008,
            max_position_embeddings=2048,
            rms_norm_eps=1e-06,
            attention_bias=False,
            mlp_bias=False,
            head_dim=None,
        )
    ),
    "mistral": ConfigReader(
        dense(
            vocab_size=32000,
            intermediate_size=14336,
            num_key_value_heads=8,
            head_dim=None,
            max_position_embeddings=131072,
            rms_norm_eps=1e-06,
            sliding_window=4096,
        )
    ),
    "ministral": ConfigReader(
        dense(
            vocab_size=32000,
            intermediate_size=14336,
            num_key_value_heads=8,
            head_dim=None,
            max_position_embeddings=131072,
            rms_norm_eps=1e-06,
            sliding_window=4096,
            layer_types=None,
        ),
        follow=_ministral,
    ),
    "qwen2": ConfigReader(
        dense(
            vocab_size=151936,
            intermediate_size=22016,
            num_key_value_heads=32,
            max_position_embeddings=32768,
            rms_norm_eps=1e-06,
            use_sliding_window=False,
            sliding_window=4096,
            max_window_layers=28,
            layer_types=None,
            bos_token_id=None,
            eos_token_id=None,
        ),
        follow=windows_after,
    ),
    "qwen3": ConfigReader(
        dense(
            vocab_size=151936,
            intermediate_size=22016,
            num_key_value_heads=32,
            head_dim=128,
            max_position_embeddings=32768,
            rms_norm_eps=1e-06,
            attention_bias=False,
            use_sliding_window=False,
            sliding_window=4096,
            max_window_layers=28,
            layer_types=None,
            bos_token_id=None,
            eos_token_id=None,
        ),
        follow=windows_after,
    ),
}
"""Reads the configs, by ``model_type``."""


class Llama(Decoder):
    """`jpaged.model_api.CausalLM` for the families above; `config` is their Hugging Face config."""

    configs = _CONFIGS

    def __init__(self, config: Any, build: BuildContext):
        check_model_type(config, _MODEL_TYPES)
        heads = Heads.of_config(config, build)
        kinds = _kinds(config)
        window = getattr(config, "sliding_window", None)
        groups = layer_groups(kinds, heads.layout.kv_heads, heads.head_dim, window, q_per_kv=heads.layout.q_per_kv)
        rotary = rotary_from_config(config, heads.head_dim, longest=build.longest)

        def make(kind: LayerKind, build: BuildContext) -> LlamaLayer:
            return LlamaLayer(config, kind, heads, build)

        super().__init__(
            config,
            build,
            kinds,
            make,
            groups=groups,
            rotary={group.name: rotary for group in groups},
            norm=RMSNorm(config.hidden_size, config.rms_norm_eps, build),
        )
        # Loops on CPU skip rows; other devices compute all rows of a program's shape, even those that are not read.
        self.skips_unread_rows = build.product_impl == "cpu" and not self.encodes(config)

    @staticmethod
    def draft_head(config: Any, build: BuildContext) -> Eagle3Head | DFlashHead:
        """See `jpaged.model_api.HasDraftHead`; the config is that of an EAGLE-3 head or a DFlash drafter."""
        if is_dflash_drafter(config):
            return DFlashHead(config, build)
        if not is_eagle3_head(config):
            raise ValueError(
                "Llama has no head that predicts further tokens; EAGLE-3 and DFlash have folders of their own"
            )
        return Eagle3Head(config, build)
