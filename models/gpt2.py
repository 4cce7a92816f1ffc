"""GPT-2 (Radford et al., 2019): learned positions, LayerNorms, and matrices that are stored inputs first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from jpaged.model_api import BuildContext, HostArray, WeightSource

from . import weights as convert
from .attention import ProjectionNames
from .decoder import check_model_type
from .dense import DecoderSpec, DenseDecoder, MLPSpec, NormNames
from .linear import Embedding, LiveRows
from .stack import LayerKind

_ONLY = {
    "add_cross_attention": False,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "reorder_and_upcast_attn": False,
}
"""Fields of which one value is supported, the one of all published models."""


class GPT2(DenseDecoder):
    """`jpaged.model_api.CausalLM` for GPT-2; `config` is a Hugging Face ``GPT2Config``."""

    def __init__(self, config: Any, build: BuildContext):
        check_model_type(config, ("gpt2",))
        for name, value in _ONLY.items():
            if getattr(config, name) != value:
                raise ValueError(f"{name}={getattr(config, name)} is not supported; only {value}")
        spec = DecoderSpec(
            MLPSpec(
                config.n_inner or 4 * config.n_embd,
                config.activation_function,
                bias=True,
                gated=False,
                names=("c_fc", "c_proj"),
            ),
            config.layer_norm_epsilon,
            (LayerKind("full"),) * config.n_layer,
            norm="layer",
            norms=NormNames("ln_1", None, "ln_2", None),
            qkv_bias=True,
            out_bias=True,
            attention="attn",
            projections=ProjectionNames(qkv=("c_attn",), out="c_proj"),
            still_groups=("full",),
            prefix="transformer",
            embed_name="wte",
            norm_name="ln_f",
        )
        super().__init__(config, build, spec)
        self.positions = Embedding(config.n_positions, config.n_embd, build, partition=P(None, None))

    def embed(
        self, tokens: Int[Array, " tokens"], positions: Int[Array, " tokens"], live_rows: LiveRows = None
    ) -> Float[Array, "tokens embed"]:
        return super().embed(tokens, positions, live_rows) + self.positions(positions)

    def weights(self) -> Iterator[WeightSource]:
        table = f"{self._prefix}.wpe"
        yield from self.positions.weights(("positions",), table, convert.as_stored, may_quantise=False)
        for source in super().weights():
            if source.layer is None:
                yield source
            else:
                names = tuple(name.replace(".layers.", ".h.", 1) for name in source.sources)
                # Adapters are placed by matrices that are stored outputs first.
                transposed = _of_inputs_first(source.convert)
                yield replace(source, sources=names, convert=transposed, adaptable=False, inputs_first=True)


def _of_inputs_first(of_outputs_first: Callable[..., HostArray]) -> Callable[..., HostArray]:
    """Return a converter of [in, out] that applies one of [out, in]; vectors stay as they are."""

    def converted(*stored: np.ndarray) -> HostArray:
        return of_outputs_first(*(array.T if array.ndim > 1 else array for array in stored))

    return converted
