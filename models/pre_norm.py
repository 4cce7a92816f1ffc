"""Holds the layer that most families share: norms before its two blocks, which may be any mixer and any MLP."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from flax import nnx
from jaxtyping import Array, Float

from jpaged.model_api import Attend, BuildContext, LayerRef, WeightSource

from .layers import RMSNorm, scaled
from .stack import PendingResidual, Shared


@dataclass(frozen=True)
class LayerNames:
    """A checkpoint's names of the norms and blocks of a layer, in order, after the layer's own name.

    Where `mlp` is empty, the MLP's parts have names after the layer's.
    """

    input_norm: str = "input_layernorm"
    mixer: str = "self_attn"
    post_norm: str = "post_attention_layernorm"
    mlp: str = "mlp"


class PreNormLayer(nnx.Module):
    """``x += mixer(norm(x)); x += mlp(norm(x))``.

    Args:
        mixer: mixes the tokens of a sequence; is called as `attention.Attention` is.
        mlp: is called as `layers.GatedMLP` is.
        norm_offset: see `RMSNorm`.
        residual_scale: multiplies what both blocks add.
    """

    takes_pending_residual = True

    def __init__(
        self,
        size: int,
        eps: float,
        mixer: Any,
        mlp: Any,
        build: BuildContext,
        *,
        names: LayerNames | None = None,
        norm_offset: float = 0.0,
        residual_scale: float = 1.0,
    ):
        self.input_norm = RMSNorm(size, eps, build, offset=norm_offset)
        self.mixer = mixer
        self.post_norm = RMSNorm(size, eps, build, offset=norm_offset)
        self.mlp = mlp
        self.names = names or LayerNames()
        self.residual_scale = residual_scale

    def __call__(
        self,
        hidden: PendingResidual | Float[Array, "tokens embed"],
        shared: Shared,
        cache: Any,
        ref: LayerRef,
        attend: Attend,
    ) -> tuple[PendingResidual, Any]:
        hidden, normed = self.input_norm.norm_residual(hidden)
        mixed, cache = self.mixer(normed, shared, cache, ref, attend)
        hidden, normed = self.post_norm.norm_residual(PendingResidual(hidden, scaled(mixed, self.residual_scale)))
        return PendingResidual(hidden, scaled(self.mlp(normed, shared.live_rows), self.residual_scale)), cache

    def weights(self, name: str, layer: int) -> Iterator[WeightSource]:
        """Yield the sources of layer number `layer`, whose tensors begin with `name`."""
        names = self.names
        yield from self.input_norm.weights(("input_norm",), f"{name}.{names.input_norm}", layer)
        yield from self.mixer.weights(("mixer",), f"{name}.{names.mixer}", layer)
        yield from self.post_norm.weights(("post_norm",), f"{name}.{names.post_norm}", layer)
        yield from self.mlp.weights(("mlp",), f"{name}.{names.mlp}".rstrip("."), layer)
