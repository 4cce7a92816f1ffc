"""Llama 3.2 Vision (Llama Team, 2024): Llama 3, and layers in between whose tokens attend to the tiles of an image.

Such a layer makes no K and V of tokens: those of an image are made once, from the encoder's features, and every token
after the image reads them. Text before the first image sees none, and these layers do not change it, as in Meta's own
code and in prompts without images.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from jpaged.model_api import (
    TENSOR_AXIS,
    AttendToImages,
    BuildContext,
    CrossAttentionGroup,
    LayerRef,
    WeightSource,
)

from . import weights as convert
from .attention import Heads
from .decoder import Decoder, check_model_type
from .groups import layer_groups
from .layers import GatedMLP, RMSNorm, check_activation
from .linear import Linear
from .llama import LlamaLayer
from .parameters import constant_param
from .rope import rotary_from_config
from .stack import LayerKind, Shared
from .vision import MllamaProjector, MllamaVision

_MORE_TOKENS = 8
"""Rows of the embedding after the vocabulary: the first is the token that stands for an image."""


class ImageLayer(nnx.Module):
    """``x += gate * attention(norm(x), image); x += gate * mlp(norm(x))`` for tokens that see an image.

    Each gate is the tanh of one number. Parameters: q [embed, kv_heads * q_per_kv * head_dim], out its transpose's
    shape; what makes K and V is an `ImageKeys`.
    """

    def __init__(self, config: Any, heads: Heads, build: BuildContext):
        size, eps = config.hidden_size, config.rms_norm_eps
        columns = heads.layout.kv_heads * heads.layout.q_per_kv * heads.head_dim
        self.input_norm = RMSNorm(size, eps, build)
        self.q = Linear(size, columns, build, partition=P(None, TENSOR_AXIS))
        self.q_norm = RMSNorm(heads.head_dim, eps, build)
        self.out = Linear(columns, size, build, partition=P(TENSOR_AXIS, None))
        self.attention_gate = constant_param(build, (1,))
        self.post_norm = RMSNorm(size, eps, build)
        activation = check_activation(config.hidden_act, "hidden_act")
        self.mlp = GatedMLP(size, config.intermediate_size, activation, build, bias=False)
        self.mlp_gate = constant_param(build, (1,))
        self.heads = heads

    def __call__(
        self, hidden: Float[Array, "tokens embed"], shared: Shared, cache: Any, ref: LayerRef, attend: AttendToImages
    ) -> tuple[Float[Array, "tokens embed"], Any]:
        layout, width = self.heads.layout, self.heads.head_dim
        q = self.q(self.input_norm(hidden), shared.live_rows)
        q = self.q_norm(q.reshape(len(hidden), layout.kv_heads, layout.q_per_kv, width))
        cache, found = attend(cache, ref, q, scale=width**-0.5)
        if found is None:
            return hidden, cache
        mixed, sees = found
        mixed = self.out(mixed.astype(hidden.dtype).reshape(len(hidden), -1), shared.live_rows)
        hidden = hidden + jnp.where(sees[:, None], jnp.tanh(self.attention_gate[...]) * mixed, 0)
        made = self.mlp(self.post_norm(hidden), shared.live_rows)
        return hidden + jnp.where(sees[:, None], jnp.tanh(self.mlp_gate[...]) * made, 0), cache

    def weights(self, name: str, layer: int) -> Iterator[WeightSource]:
        """Yield the sources of layer number `layer`, whose tensors begin with `name`, but those of `ImageKeys`."""
        heads, mixer = self.heads, f"{name}.cross_attn"
        fuse = convert.fuse_qkv(heads.layout, heads.num_heads, heads.num_kv_heads, heads.head_dim)
        split = convert.split_out(heads.layout, heads.num_heads, heads.head_dim)
        yield from self.input_norm.weights(("input_norm",), f"{name}.input_layernorm", layer)
        yield from self.q.weights(("q",), (f"{mixer}.q_proj",), layer, fuse)
        yield from self.q_norm.weights(("q_norm",), f"{mixer}.q_norm", layer)
        yield from self.out.weights(("out",), (f"{mixer}.o_proj",), layer, split, unit=heads.head_dim)
        yield from self.post_norm.weights(("post_norm",), f"{name}.post_attention_layernorm", layer)
        yield from self.mlp.weights(("mlp",), f"{name}.mlp", layer)
        for gate, tensor in (("attention_gate", "cross_attn_attn_gate"), ("mlp_gate", "cross_attn_mlp_gate")):
            yield WeightSource((gate,), (f"{name}.{tensor}",), convert.as_stored, P(None), layer)


class ImageKeys(nnx.Module):
    """Makes K and V of an image for one `ImageLayer`: of images and not of tokens, so it stands outside the layers.

    Parameters: k and v [embed, kv_heads * head_dim]; norm over head_dim, of K.
    """

    def __init__(self, config: Any, heads: Heads, build: BuildContext):
        size, columns, split = config.hidden_size, heads.layout.kv_heads * heads.head_dim, P(None, TENSOR_AXIS)
        self.k = Linear(size, columns, build, partition=split)
        self.v = Linear(size, columns, build, partition=split)
        self.norm = RMSNorm(heads.head_dim, config.rms_norm_eps, build)
        self.heads = heads

    def __call__(
        self, features: Float[Array, "features embed"]
    ) -> tuple[Float[Array, "features kv_heads head_dim"], Float[Array, "features kv_heads head_dim"]]:
        shape = len(features), self.heads.layout.kv_heads, self.heads.head_dim
        return self.norm(self.k(features).reshape(shape)), self.v(features).reshape(shape)

    def weights(self, path: tuple[str, ...], name: str) -> Iterator[WeightSource]:
        """Yield the sources of the tensors ``{name}.k_proj``, ``.v_proj`` and ``.k_norm``; `path` is this module's
        place in the model."""
        heads = self.heads
        place = convert.place_kv(heads.layout, heads.num_kv_heads, heads.head_dim)
        yield from self.k.weights((*path, "k"), (f"{name}.k_proj",), None, place, may_quantise=False)
        yield from self.v.weights((*path, "v"), (f"{name}.v_proj",), None, place, may_quantise=False)
        yield from self.norm.weights((*path, "norm"), f"{name}.k_norm")


def _cross_layers(text: Any) -> tuple[int, ...]:
    """Return the numbers of the layers that attend to images.

    Raises:
        ValueError: there are none, or they are not all layers of the model.
    """
    cross = tuple(sorted(text.cross_attention_layers))
    if not cross or not set(cross) <= set(range(text.num_hidden_layers)):
        raise ValueError(f"cross_attention_layers={list(cross)} are not some of {text.num_hidden_layers} layers")
    return cross


def _heads(text: Any, build: BuildContext) -> Heads:
    width = text.hidden_size // text.num_attention_heads
    return Heads.of(text.num_attention_heads, text.num_key_value_heads, width, build)


class MllamaText(Decoder):
    """`jpaged.model_api.CausalLM` for text alone; `config` is a Hugging Face ``MllamaTextConfig``.

    The layers that attend to images are left out, as they would do nothing.
    """

    def __init__(self, config: Any, build: BuildContext):
        check_model_type(config, ("mllama_text_model",))
        cross, heads = _cross_layers(config), _heads(config, build)
        self.numbers = tuple(number for number in range(config.num_hidden_layers) if number not in cross)
        kinds = [LayerKind("full")] * len(self.numbers)
        super().__init__(
            config,
            build,
            kinds,
            lambda kind, build: LlamaLayer(config, kind, heads, build),
            groups=layer_groups(kinds, heads.layout.kv_heads, heads.head_dim, q_per_kv=heads.layout.q_per_kv),
            rotary={"full": rotary_from_config(config, heads.head_dim)},
            norm=RMSNorm(config.hidden_size, config.rms_norm_eps, build),
            prompt_vocab_size=config.vocab_size + _MORE_TOKENS,
        )

    def _stored_as(self, number: int) -> int:
        return self.numbers[number]


class Mllama(Decoder):
    """`jpaged.model_api.CausalLM` and `TakesImages`; `config` is a Hugging Face ``MllamaConfig``."""

    def __init__(self, config: Any, build: BuildContext):
        check_model_type(config, ("mllama",))
        text, vision = config.text_config, config.vision_config
        cross, heads = _cross_layers(text), _heads(text, build)
        width = heads.head_dim
        kinds = [LayerKind("images" if i in cross else "full") for i in range(text.num_hidden_layers)]

        def make(kind: LayerKind, build: BuildContext) -> nnx.Module:
            return ImageLayer(text, heads, build) if kind.group == "images" else LlamaLayer(text, kind, heads, build)

        self.tile_features = (vision.image_size // vision.patch_size) ** 2 + 1
        group = CrossAttentionGroup(
            "images", cross, heads.layout.kv_heads, width, vision.max_num_tiles * self.tile_features
        )
        super().__init__(
            text,
            build,
            kinds,
            make,
            groups=(*layer_groups(kinds, heads.layout.kv_heads, width, q_per_kv=heads.layout.q_per_kv), group),
            rotary={"full": rotary_from_config(text, width)},
            norm=RMSNorm(text.hidden_size, text.rms_norm_eps, build),
            prompt_vocab_size=text.vocab_size + _MORE_TOKENS,
        )
        self.image_group = group
        self.cross_layers = cross
        self.encoder_parts = ("vision", "projector", "keys")
        self.vision = MllamaVision(vision, build)
        self.projector = MllamaProjector(config, build)
        self.keys = nnx.Dict({f"layer_{number}": ImageKeys(text, heads, build) for number in cross})

    def encode(
        self, arrays: Mapping[str, Array]
    ) -> tuple[
        Float[Array, "images layers features heads head_dim"], Float[Array, "images layers features heads head_dim"]
    ]:
        """See `jpaged.model_api.TakesImages`; K and V of each image's tiles, those of padding last.

        Args:
            arrays: ``pixel_values``, [images, tiles, channels, height, width], ``aspect_ratio_id``, [images], and
                ``aspect_ratio_mask``, [images, tiles].
        """
        seen = self.vision(arrays["pixel_values"], arrays["aspect_ratio_id"], arrays["aspect_ratio_mask"])
        features = self.projector(seen.reshape(-1, seen.shape[-1]))
        pairs = [self.keys[f"layer_{number}"](features) for number in self.cross_layers]
        k, v = (
            jnp.stack([part.reshape(len(seen), -1, *part.shape[1:]) for part in parts], axis=1)
            for parts in zip(*pairs, strict=True)
        )
        return k, v

    def padded(self, arrays: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """Return the arrays unchanged: all images have as many places for tiles."""
        return arrays

    def examples(self) -> Iterator[tuple[Mapping[str, np.ndarray], int]]:
        """Yield the one shape."""
        tiles = self.vision.image_shape[0]
        arrays = {
            "pixel_values": np.zeros(self.vision.image_shape, np.float32),
            "aspect_ratio_id": np.zeros((), np.int32),
            "aspect_ratio_mask": np.ones(tiles, np.int32),
        }
        yield arrays, tiles * self.tile_features

    def weights(self) -> Iterator[WeightSource]:
        yield from super().weights()
        for number in self.cross_layers:
            yield from self.keys[f"layer_{number}"].weights(
                ("keys", f"layer_{number}"), f"{self._prefix}.layers.{number}.cross_attn"
            )
        yield from self.vision.weights(("vision",), "vision_model")
        yield from self.projector.weights(("projector",), "multi_modal_projector")
