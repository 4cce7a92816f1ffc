"""Pixtral's tower (Agrawal et al., 2024), of Mistral Small 3.1, Ministral 3 and Pixtral 12B."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from jpaged.model_api import AttendWithinSegments, BuildContext, SegmentKind, WeightSource

from ..attention import ProjectionNames
from ..dense import MLPSpec
from ..encoder import EncoderNames, EncoderSpec
from ..layers import MLP_NAMES, RMSNorm, check_activation
from ..linear import Linear
from ..rope import Rotary
from ..stack import LayerKind, Shared
from .family import VisionFamily
from .tower import PixelStem, SquareMerger, axial, layer_weights, layers_of, row_of_patches, within

EPS = 1e-5
NAMES = EncoderNames(
    layers="vision_tower.transformer.layers",
    attention="attention",
    projections=ProjectionNames(),
    attention_norm="attention_norm",
    mlp_norm="ffn_norm",
)
PROCESSOR = "jpaged.images.pixtral:PixtralImageProcessor"
PREFIXES = tuple(
    (before + part, part) for part in ("vision_tower.", "multi_modal_projector.") for before in ("model.", "")
)


def layers_seen(config: Any, depth: int) -> tuple[int, ...]:
    """Return how many layers each of the hidden states has passed that ``vision_feature_layer`` names.

    Args:
        depth: layers that the tower has.

    Raises:
        ValueError: there is no such layer.
    """
    given = config.vision_feature_layer
    named = [given] if isinstance(given, int) else list(given)
    if not named or not all(-depth - 1 <= number <= depth for number in named):
        raise ValueError(f"vision_feature_layer={given}, and the tower has {depth} layers")
    return tuple(number % (depth + 1) for number in named)


class PixtralVision(nnx.Module):
    """Pixtral's tower and what leads to the language model; `config` is the whole model's, with ``vision_config``.

    Parameters: stem; stem_norm; layers; where patches are merged (Mistral 3), patch_norm and merge, a product of the
    patches of a square; project.
    """

    levels = 1

    def __init__(self, config: Any, build: BuildContext):
        vision, text = config.vision_config, config.get_text_config()
        embed, channels, patch = vision.hidden_size, vision.num_channels, vision.patch_size
        merges = hasattr(config, "spatial_merge_size")
        if getattr(config, "vision_feature_select_strategy", "full") != "full":
            strategy = config.vision_feature_select_strategy
            raise ValueError(
                f"vision_feature_select_strategy={strategy!r} is not supported, only 'full': no patch is a class"
            )
        squares = config.spatial_merge_size**2 if merges else 1
        self.layout = row_of_patches(channels, patch**2, squares, SegmentKind("pictures"))
        self.stem = PixelStem(channels, patch**2, embed, build, bias=False)
        self.stem_norm = RMSNorm(embed, EPS, build)
        self.rotary = two_axes(embed // vision.num_attention_heads, vision.rope_parameters["rope_theta"])
        seen = layers_seen(config, vision.num_hidden_layers)
        spec = EncoderSpec(
            embed,
            vision.num_attention_heads,
            MLPSpec(vision.intermediate_size, vision.hidden_act, names=MLP_NAMES, block="feed_forward"),
            EPS,
            (LayerKind("pictures"),) * max(seen),
            norm="rms",
            norm_before=True,
            qkv_bias=False,
            out_bias=False,
            rotary=(("pictures", self.rotary),),
            names=NAMES,
        )
        self.layers = layers_of(spec, build)
        if len(seen) > 1:
            self.layers.tap(seen)
        self.patch_norm = RMSNorm(embed, text.rms_norm_eps, build) if merges else None
        self.merge = Linear(embed * self.layout.merge, embed, build, partition=P(None, None)) if merges else None
        self.project = SquareMerger(
            None,
            embed * len(seen),
            1,
            text.hidden_size,
            build,
            activation=check_activation(config.projector_hidden_act, "projector_hidden_act"),
            columns=text.hidden_size,
            bias=config.multimodal_projector_bias,
        )

    def __call__(self, row: Mapping[str, Array], attend: AttendWithinSegments) -> Float[Array, "features embeds"]:
        """Return the features of a row."""
        live = row["pictures"][-1]
        x = self.stem_norm(self.stem(row["pixels"], row["scale"], row["shift"], live))
        tables = self.rotary.tables(row["places"][:, :2].astype(jnp.int32))
        x, _, *tapped = self.layers(x, Shared({"pictures": tables}, live), None, within(attend))
        if tapped:
            (x,) = tapped
        squares = live // self.layout.merge
        if self.patch_norm is not None and self.merge is not None:
            x = self.patch_norm(x)
            x = self.merge(x.reshape(len(x) // self.layout.merge, -1), squares)
        return self.project(x, squares)

    def weights(self) -> Iterator[WeightSource]:
        """Yield the sources of all parameters."""
        yield from self.stem.weights(("stem",), "vision_tower.patch_conv")
        yield from self.stem_norm.weights(("stem_norm",), "vision_tower.ln_pre")
        yield from layer_weights(self.layers, (), NAMES.layers)
        if self.patch_norm is not None and self.merge is not None:
            yield from self.patch_norm.weights(("patch_norm",), "multi_modal_projector.norm")
            name = "multi_modal_projector.patch_merger.merging_layer"
            squares = patches_first(self.layout.merge)
            yield from self.merge.weights(("merge",), (name,), None, squares, may_quantise=False)
        layers = [f"multi_modal_projector.linear_{number}" for number in (1, 2)]
        yield from self.project.weights(("project",), layers=layers)

    def locate(self, source: WeightSource) -> tuple[tuple[str | int, ...], int | None]:
        """Return a source's target, see `jpaged.model_api.CausalLM.locate`."""
        return self.layers.locate(source, "layers")


def two_axes(head_dim: int, theta: float) -> Rotary:
    """Return the frequencies of heads whose pairs are turned by a patch's row and column in turns, the rows' first."""
    axes = axial(head_dim, theta).axes
    every = [theta ** (-2 * pair / head_dim) for pair in range(head_dim // 2)]
    return Rotary((*every[::2], *every[1::2]), axes=axes)


def patches_first(merge: int) -> Any:
    """Return what makes a product's matrix [inputs, outputs] of one whose inputs are the patches of a square, number by
    number of a patch."""

    def turned(matrix: np.ndarray) -> np.ndarray:
        outputs = len(matrix)
        return matrix.reshape(outputs, -1, merge).transpose(2, 1, 0).reshape(-1, outputs)

    return turned


MISTRAL3 = VisionFamily(PixtralVision, PROCESSOR, PREFIXES)
