"""Reads a config from the fields of a config.json: defaults, older names of fields, and what follows from others.

A family states its defaults in a `ConfigReader` for each ``model_type``: those of Hugging Face's config classes, as
published files leave out what equals them. A test compares all of them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from jpaged.model_api import ModelConfig

Fields: TypeAlias = dict[str, Any]

_MAY_BE_NULL = frozenset(
    {
        "attention_chunk_size",
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "head_dim",
        "layer_types",
        "mamba_d_ssm",
        "n_group",
        "num_experts_per_tok",
        "num_key_value_heads",
        "q_lora_rank",
        "sliding_window",
        "sliding_window_pattern",
        "topk_group",
        "use_bias",
        "use_bidirectional_attention",
        "use_qk_norm",
    }
)
"""Fields with a default other than null that a file may set to null: mostly for "not at all"."""

_TYPES: Mapping[str, type] = {
    "attn_layer_indices": list,
    "head_dim": int,
    "layer_types": list,
    "mlp_multipliers": list,
    "mlp_only_layers": list,
    "moe_layers": list,
    "n_group": int,
    "no_rope_layers": list,
    "num_experts_per_tok": int,
    "num_key_value_heads": int,
    "rope_parameters": dict,
    "rope_scaling": dict,
    "sliding_window": int,
    "ssm_multipliers": list,
    "topk_group": int,
    "word_embed_proj_dim": int,
}
"""Types of fields whose default is null."""

_MAY_BE_TEXT = frozenset({"sliding_window_pattern"})
"""Fields with a default of another type that a file may set to text."""

_OLD_TYPES = {"mamba": "linear_attention", "attention": "full_attention"}
"""Entries of ``layer_types`` in older files."""

_NEEDS = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings"),
    "longrope": ("short_factor", "long_factor", "original_max_position_embeddings"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
"""The parameters of each scaling that have no default."""

_BESIDES_SCALING = ("rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved")
"""Entries of ``rope_parameters`` that a ``rope_scaling`` next to it does not replace."""

_FROM_PRETRAINING = ("llama3", "yarn", "longrope")
"""Scalings that start from the context of pretraining, by default the model's limit."""


@dataclass(frozen=True)
class Rope:
    """Says how a family's config describes rotation.

    Attributes:
        theta: the default of ``rope_theta``.
        rotated: the default of ``partial_rotary_factor``; None = the field is left out.
        theta_name, rotated_name: the names of both in files.
        by_type: whether ``rope_parameters`` has an entry for each type of layer; `local_theta` is then the default of
            ``sliding_attention``, and `local_name` its field in older files.
        scaling: the default of ``rope_parameters`` without its theta; None = no scaling.
    """

    theta: float = 10000.0
    rotated: float | None = None
    theta_name: str = "rope_theta"
    rotated_name: str = "partial_rotary_factor"
    by_type: bool = False
    local_theta: float = 10000.0
    local_name: str | None = None
    scaling: Mapping[str, Any] | None = None

    def standardise(self, fields: Fields) -> None:
        """Replace the older fields by ``rope_parameters``, with every parameter that a rotation needs.

        Raises:
            ValueError: a scaling lacks a parameter; names it.
        """
        given, older = fields.get("rope_parameters"), fields.pop("rope_scaling", None)
        theta = fields.pop(self.theta_name, self.theta)
        rotated = fields.pop(self.rotated_name, self.rotated)
        if self.by_type:
            rope = given or {}
            local_theta = self.local_theta if self.local_name is None else fields.pop(self.local_name, self.local_theta)
            whole = {**(rope.get("full_attention") or {}), **(older or {})}
            local = rope.get("sliding_attention") or {}
            rope |= {"full_attention": whole, "sliding_attention": local}
            each = [(whole, theta), (local, local_theta)]
        else:
            rope = older or given or dict(self.scaling or {})
            if older and given:  # a scaling that was added to a file of today's form, which has these there
                rope = {name: given[name] for name in _BESIDES_SCALING if name in given} | older
            types = set(fields.get("layer_types") or ()) & rope.keys()
            each = [(rope[kind], theta) for kind in types if rope[kind] is not None] if types else [(rope, theta)]
        for parameters, own_theta in each:
            self._complete(parameters, own_theta, rotated, fields)
        fields["rope_parameters"] = rope

    def _complete(self, parameters: Fields, theta: float, rotated: float | None, fields: Fields) -> None:
        parameters.setdefault("rope_theta", theta)
        if rotated is not None:
            parameters.setdefault("partial_rotary_factor", rotated)
        kind = str(parameters.setdefault("rope_type", parameters.get("type", "default")))
        if kind in _FROM_PRETRAINING:
            if "original_max_position_embeddings" in fields:
                parameters["original_max_position_embeddings"] = fields["original_max_position_embeddings"]
            else:
                parameters.setdefault("original_max_position_embeddings", fields["max_position_embeddings"])
        for name in _NEEDS.get(kind, ()):
            if parameters.get(name) is None:
                raise ValueError(f"rope_parameters of rope_type={kind!r} lack {name}")


def _nothing(fields: Fields) -> None:
    """Complete no field."""


@dataclass(frozen=True)
class ConfigReader:
    """Makes a `ModelConfig` of the fields of a config.json.

    Attributes:
        defaults: the fields that the family reads, with their values where a file has none.
        rope: how rotation is described; None where the family does not rotate.
        follow: sets the fields that follow from others, in place, before rotation is read. It raises ValueError for
            fields that contradict one another.
        same: pairs of names of one field.
    """

    defaults: Mapping[str, Any]
    rope: Rope | None = field(default_factory=Rope)
    follow: Callable[[Fields], None] = _nothing
    same: tuple[tuple[str, str], ...] = ()

    def __call__(self, given: Mapping[str, Any]) -> ModelConfig:
        """Return the config.

        Raises:
            ValueError: a field has a value of the wrong type, or fields contradict one another; names them.
        """
        fields = copy.deepcopy({**self.defaults, **given})
        for names in self.same:
            said = next(name for where in (given, self.defaults) for name in names if name in where)
            fields |= dict.fromkeys(names, fields[said])
        self._check(fields)
        older_dtype = fields.pop("torch_dtype", None)
        fields["dtype"] = fields.get("dtype") or older_dtype
        self.follow(fields)
        self._complete_heads(fields)
        if fields.get("layer_types") is not None:
            fields["layer_types"] = [_OLD_TYPES.get(kind, kind) for kind in fields["layer_types"]]
        if self.rope is not None:
            self.rope.standardise(fields)
        return ModelConfig(given, fields)

    def _complete_heads(self, fields: Fields) -> None:
        heads = fields.get("num_attention_heads")
        if heads is None:
            return
        if "num_key_value_heads" in self.defaults and fields["num_key_value_heads"] is None:
            fields["num_key_value_heads"] = heads
        if fields.get("head_dim") is None:
            size = fields["hidden_size"]
            if size % heads:
                raise ValueError(f"hidden_size={size} is not a multiple of num_attention_heads={heads}")
            fields["head_dim"] = size // heads

    def _check(self, fields: Fields) -> None:
        for name in (*self.defaults, "rope_parameters", "rope_scaling"):
            value, default = fields.get(name), self.defaults.get(name)
            if name.endswith("_token_id") or (name in _MAY_BE_TEXT and isinstance(value, str)):
                continue
            if value is None:
                if default is not None and name not in _MAY_BE_NULL:
                    raise ValueError(f"{name} is null; it must be {type(default).__name__}")
                continue
            wanted = _TYPES.get(name) if default is None else type(default)
            if wanted is not None and not _is(value, wanted, default):
                raise ValueError(f"{name}={str(value)[:80]!r} is {type(value).__name__}; it must be {wanted.__name__}")


def _is(value: Any, wanted: type, default: Any) -> bool:
    if isinstance(value, bool) or wanted is bool:
        return isinstance(value, bool) and wanted is bool
    if wanted is float:
        return isinstance(value, (int, float))
    if wanted in (list, tuple):
        return isinstance(value, (list, tuple))
    return isinstance(value, wanted) or (default == "auto" and isinstance(value, int))


def dense(**own: Any) -> Fields:
    """Return the defaults of a dense decoder: those that most families share, and its own."""
    shared = {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": None,
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
        "tie_word_embeddings": False,
    }
    return shared | own


def every_nth(fields: Fields, local: str, period: int) -> None:
    """Set ``layer_types``, if a file has none: the last of every `period` layers sees everything, others are local."""
    if fields["layer_types"] is None:
        layers = range(fields["num_hidden_layers"])
        fields["layer_types"] = [local if (number + 1) % period else "full_attention" for number in layers]


def windows_after(fields: Fields) -> None:
    """Set Qwen's windows: none unless ``use_sliding_window``, and then from layer ``max_window_layers`` on."""
    if not fields["use_sliding_window"]:
        fields["sliding_window"] = None
    if "max_window_layers" in fields and fields.get("layer_types", ()) is None:
        slides, first = fields["sliding_window"] is not None, fields["max_window_layers"]
        layers = range(fields["num_hidden_layers"])
        fields["layer_types"] = [
            "sliding_attention" if slides and number >= first else "full_attention" for number in layers
        ]
