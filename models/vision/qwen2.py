"""The towers of Qwen2-VL (Wang et al., 2024) and Qwen2.5-VL (Qwen Team, 2025), most of whose layers see windows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jpaged.model_api import AttendWithinSegments, BuildContext, SegmentKind, WeightSource

from ..dense import MLPSpec
from ..encoder import EncoderSpec
from ..layers import MLP_NAMES
from ..stack import LayerKind, Shared
from .family import VisionFamily
from .qwen import EPS, NAMES, PREFIXES, PROCESSOR, row_layout
from .tower import PixelStem, SquareMerger, axial, layer_weights, layers_of, within


class Qwen2Vision(nnx.Module):
    """The tower of Qwen2-VL and Qwen2.5-VL; `config` is the whole model's, with ``vision_config``.

    Patches of Qwen2.5-VL come window by window, see `jpaged.images.qwen`, so its windows are segments.
    """

    levels = 1

    def __init__(self, config: Any, build: BuildContext):
        vision = config.vision_config
        patches = getattr(vision, "window_size", None)  # pixels of a window's side, and Qwen2-VL has none
        windows: tuple[SegmentKind, ...] = ()
        kinds = ["frames"] * vision.depth
        if patches is None:
            embed, width, norm = vision.embed_dim, vision.hidden_size, "layer"
            inner = int(embed * vision.mlp_ratio)
            mlp = MLPSpec(inner, vision.hidden_act, gated=False, names=("fc1", "fc2"), bias=True)
        else:
            embed, width, norm = vision.hidden_size, vision.out_hidden_size, "rms"
            mlp = MLPSpec(vision.intermediate_size, vision.hidden_act, names=MLP_NAMES, bias=True)
            side, merge = patches // vision.patch_size // vision.spatial_merge_size, vision.spatial_merge_size
            # A picture one token high has a window for so many of its patches.
            windows = (SegmentKind("windows", (side * merge) ** 2, side * merge**2),)
            kinds = ["frames" if n in vision.fullatt_block_indexes else "windows" for n in range(vision.depth)]
        self.layout = row_layout(vision, *windows)
        numbers = vision.temporal_patch_size * vision.patch_size**2
        self.stem = PixelStem(vision.in_channels, numbers, embed, build, bias=False)
        rope = getattr(vision, "rope_parameters", None) or {}
        self.rotary = axial(embed // vision.num_heads, rope.get("rope_theta", 10000.0))
        groups = tuple(kind.name for kind in self.layout.segments)
        spec = EncoderSpec(
            embed,
            vision.num_heads,
            mlp,
            EPS,
            tuple(map(LayerKind, kinds)),
            norm=norm,
            norm_before=True,
            rotary=tuple((group, self.rotary) for group in groups),
            names=NAMES,
        )
        self.groups = groups
        self.layers = layers_of(spec, build)
        self.merger = SquareMerger(spec.make_norm(build), embed, self.layout.merge, width, build)

    def __call__(self, row: Mapping[str, Array], attend: AttendWithinSegments) -> Float[Array, "features embed"]:
        """Return the features of a row."""
        live = row["frames"][-1]
        x = self.stem(row["pixels"], row["scale"], row["shift"], live)
        tables = self.rotary.tables(row["places"][:, :2].astype(jnp.int32))
        x, _ = self.layers(x, Shared(dict.fromkeys(self.groups, tables), live), None, within(attend))
        return self.merger(x, live // self.layout.merge)

    def weights(self) -> Iterator[WeightSource]:
        """Yield the sources of all parameters."""
        yield from self.stem.weights(("stem",), "visual.patch_embed.proj")
        yield from layer_weights(self.layers, (), NAMES.layers)
        merger = [f"visual.merger.mlp.{number}" for number in (0, 2)]
        yield from self.merger.weights(("merger",), norm="visual.merger.ln_q", layers=merger)

    def locate(self, source: WeightSource) -> tuple[tuple[str | int, ...], int | None]:
        """Return a source's target, see `jpaged.model_api.CausalLM.locate`."""
        return self.layers.locate(source, "layers")


QWEN2_VL = VisionFamily(Qwen2Vision, PROCESSOR, PREFIXES, axes=3)
