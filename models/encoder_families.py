"""Describes the encoders: one row a family, which reads the family's Hugging Face config.

Everything a row leaves out is BERT's, see `EncoderSpec`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from jpaged.model_api import BuildContext

from .attention import ProjectionNames
from .config_reader import ConfigReader, Fields, Rope
from .dense import MLPSpec
from .encoder import Encoder, EncoderNames, EncoderSpec
from .groups import kinds_from_types, type_of_group
from .rope import rotary_from_config
from .stack import LayerKind

_BERT_MLP = ("intermediate.dense", "output.dense")


def _all_full(number: int) -> tuple[LayerKind, ...]:
    return (LayerKind("full"),) * number


def _bert(config: Any) -> EncoderSpec:
    """BERT (Devlin et al., 2018)."""
    kind = getattr(config, "position_embedding_type", None) or "absolute"
    if kind != "absolute":
        raise ValueError(f"position_embedding_type={kind!r} is not supported; only 'absolute'")
    if getattr(config, "is_decoder", False):
        raise ValueError("is_decoder=True is not supported: this family encodes")
    return EncoderSpec(
        config.hidden_size,
        config.num_attention_heads,
        MLPSpec(config.intermediate_size, config.hidden_act, bias=True, gated=False, names=_BERT_MLP, block=""),
        config.layer_norm_eps,
        _all_full(config.num_hidden_layers),
    )


def _roberta(config: Any) -> EncoderSpec:
    """RoBERTa (Liu et al., 2019) and XLM-RoBERTa: positions begin after the padding token's id."""
    return replace(_bert(config), position_offset=config.pad_token_id + 1)


def _distilbert(config: Any) -> EncoderSpec:
    """DistilBERT (Sanh et al., 2019): no segments."""
    return EncoderSpec(
        config.dim,
        config.n_heads,
        MLPSpec(config.hidden_dim, config.activation, bias=True, gated=False, names=("lin1", "lin2"), block="ffn"),
        1e-12,
        _all_full(config.n_layers),
        names=EncoderNames(
            types=None,
            layers="transformer.layer",
            projections=ProjectionNames(("q_lin", "k_lin", "v_lin"), "out_lin"),
            attention_norm="sa_layer_norm",
            mlp_norm="output_layer_norm",
        ),
    )


def _mpnet(config: Any) -> EncoderSpec:
    """MPNet (Song et al., 2020): no segments; biases of distances, which all layers share."""
    return replace(
        _bert(config),
        position_offset=2,  # the padding token is 1 whatever the config says
        distance_buckets=config.relative_attention_num_buckets,
        names=EncoderNames(
            types=None,
            projections=ProjectionNames(("attn.q", "attn.k", "attn.v"), "attn.o"),
            attention_norm="attention.LayerNorm",
            distance_biases="encoder.relative_attention_bias",
        ),
    )


def _nomic_bert(config: Any) -> EncoderSpec:
    """Nomic Embed (Nussbaum et al., 2024): rotary positions, a gated MLP, no biases."""
    return EncoderSpec(
        config.hidden_size,
        config.num_attention_heads,
        MLPSpec(config.intermediate_size, config.hidden_act),
        config.layer_norm_eps,
        _all_full(config.num_hidden_layers),
        qkv_bias=False,
        out_bias=False,
        rotary=(("full", rotary_from_config(config, config.hidden_size // config.num_attention_heads)),),
        names=EncoderNames(
            positions=None,
            layers="layers",
            attention="self_attn",
            projections=ProjectionNames(),
            attention_norm="post_attention_layernorm",
            mlp_norm="post_mlp_layernorm",
        ),
    )


def _modernbert(config: Any) -> EncoderSpec:
    """ModernBERT (Warner et al., 2024): norms before each part, rotary positions, most layers see a window only."""
    kinds = kinds_from_types(config)
    first = replace(kinds[0], variant="unnormed")
    head_dim = config.hidden_size // config.num_attention_heads
    return EncoderSpec(
        config.hidden_size,
        config.num_attention_heads,
        MLPSpec(config.intermediate_size, config.hidden_activation, bias=config.mlp_bias, names=("Wi", "Wo")),
        config.norm_eps,
        (first, *kinds[1:]),
        reach=config.local_attention // 2,
        norm_before=True,
        norm_bias=config.norm_bias,
        qkv_bias=config.attention_bias,
        out_bias=config.attention_bias,
        rotary=tuple(
            (group, rotary_from_config(config, head_dim, type_of_group(group)))
            for group in dict.fromkeys(kind.group or "full" for kind in kinds)
        ),
        names=EncoderNames(
            words="embeddings.tok_embeddings",
            positions=None,
            types=None,
            norm="embeddings.norm",
            layers="layers",
            attention="attn",
            projections=ProjectionNames(("Wqkv",), "Wo"),
            attention_norm="attn_norm",
            mlp_norm="mlp_norm",
            final_norm="final_norm",
        ),
    )


def _gte(config: Any) -> EncoderSpec:
    """GTE v1.5 (Zhang et al., 2024): rotary positions, a gated MLP with a bias at its end."""
    nomic = _nomic_bert(config)
    return replace(
        nomic,
        mlp=replace(nomic.mlp, down_bias=True),
        qkv_bias=True,
        out_bias=True,
        names=replace(nomic.names, types=nomic.names.types if config.type_vocab_size else None),
    )


def _of_new(fields: Fields) -> None:
    """Refuse what no published checkpoint has, and say NTK's stretched rotation in terms of others: its base is
    multiplied by the factor, and its frequencies are divided by ``factor ** (2 / head_dim)`` (Su, 2023)."""
    only = {"position_embedding_type": "rope", "layer_norm_type": "layer_norm", "logn_attention_scale": False}
    for name, value in only.items():
        if fields.get(name, value) != value:
            raise ValueError(f"{name}={fields[name]!r} is not supported; only {value!r}")
    scaling = fields.get("rope_scaling")
    if scaling and scaling.get("type", scaling.get("rope_type")) == "ntk":
        if scaling.get("mixed_b") is not None:
            raise ValueError(f"rope_scaling has mixed_b={scaling['mixed_b']}, which is not supported")
        factor, head_dim = scaling["factor"], fields["hidden_size"] // fields["num_attention_heads"]
        fields["rope_theta"] *= factor
        fields["rope_scaling"] = {"rope_type": "linear", "factor": factor ** (2 / head_dim)}


_NEW = ConfigReader(
    {
        "vocab_size": 30528,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "hidden_act": "gelu",
        "max_position_embeddings": 2048,
        "type_vocab_size": 1,
        "layer_norm_eps": 1e-12,
        "rope_theta": 10000.0,
    },
    rope=Rope(10000.0),
    follow=_of_new,
)
"""Reads configs of Alibaba-NLP's own code, which transformers does not have."""


ENCODERS: dict[str, Callable[[Any], EncoderSpec]] = {
    "bert": _bert,
    "roberta": _roberta,
    "xlm-roberta": _roberta,
    "distilbert": _distilbert,
    "mpnet": _mpnet,
    "nomic_bert": _nomic_bert,
    "gte": _gte,
    "new": _gte,
    "modernbert": _modernbert,
}
"""Each family's row, by the ``model_type`` of its config."""


class EncoderFamily(Encoder):
    """`jpaged.model_api.PromptEncoder` for the families in `ENCODERS`; `config` is their Hugging Face config."""

    configs: ClassVar[Mapping[str, ConfigReader]] = {"new": _NEW}

    def __init__(self, config: Any, build: BuildContext):
        if config.model_type not in ENCODERS:
            raise ValueError(f"model_type={config.model_type!r} is not one of {', '.join(ENCODERS)}")
        super().__init__(config, build, ENCODERS[config.model_type](config))
