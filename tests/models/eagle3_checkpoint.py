"""Folders of EAGLE-3 heads, and PyTorch's version of such a head as it is published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from checkpoints import make_checkpoint
from mtp_checkpoint import FILE, TorchHead
from safetensors.torch import save_file

LAYERS = [0, 1, 2]
"""Layers of a model of three whose entering states are read."""


class TorchEagle3(TorchHead):
    """The published head on transformers' model: entry i joins token i + 1 with the states at i of some layers."""

    def __init__(self, model, tensors: dict[str, torch.Tensor], config: dict[str, Any], layers: list[int]):
        self.model = model
        self.tensors = tensors
        self.config = config
        self.layers = layers

    @torch.no_grad()
    def within(self, tokens: torch.Tensor) -> torch.Tensor:
        """The states that enter the layers, side by side."""
        states = self.model.model(tokens[None], output_hidden_states=True).hidden_states
        return torch.cat([states[layer][0] for layer in self.layers], dim=-1)

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the state of each token that the layer reads."""
        states = self.within(tokens)
        if self.config.get("norm_before_fc"):
            states = self._norm("input_norm", states)
        if self.config.get("fc_norm"):
            each = states.chunk(len(self.layers), dim=-1)
            states = torch.cat([self._norm(f"fc_norm.{number}", x) for number, x in enumerate(each)], dim=-1)
        return self._times("fc", states)

    @torch.no_grad()
    def states(self, tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        embedded = self.model.model.embed_tokens(tokens)
        normed = self._norm("midlayer.input_layernorm", embedded), self._norm("midlayer.hidden_norm", hidden)
        kept = normed[1] if self.config.get("norm_before_residual") else hidden
        hidden = kept + self._attention(torch.cat(normed, dim=-1))
        x = self._norm("midlayer.post_attention_layernorm", hidden)
        gate, up = (self._times(f"midlayer.mlp.{name}_proj", x) for name in ("gate", "up"))
        hidden = hidden + self._times("midlayer.mlp.down_proj", torch.nn.functional.silu(gate) * up)
        return self._norm("norm", hidden) if self.config.get("norm_output") else hidden

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        own = self._times("lm_head", states if self.config.get("norm_output") else self._norm("norm", states))
        if "d2t" not in self.tensors:
            return own
        logits = torch.full((len(states), self.config["vocab_size"]), -torch.inf)
        logits[:, torch.arange(own.shape[1]) + self.tensors["d2t"]] = own
        return logits

    def _attention(self, x: torch.Tensor) -> torch.Tensor:
        width, count = self.config["head_dim"], len(x)
        q, k, v = (self._times(f"midlayer.self_attn.{n}_proj", x).view(count, -1, width) for n in "qkv")
        angles = torch.arange(count)[:, None] * self.config["rope_theta"] ** (-torch.arange(0, width, 2) / width)
        cos, sin = (turn(torch.cat([angles, angles], dim=-1))[:, None] for turn in (torch.cos, torch.sin))

        def turned(heads: torch.Tensor) -> torch.Tensor:
            first, second = heads.chunk(2, dim=-1)
            return heads * cos + torch.cat([-second, first], dim=-1) * sin

        q, k, v = (heads.transpose(0, 1)[None] for heads in (turned(q), turned(k), v))
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self._times("midlayer.self_attn.o_proj", mixed[0].transpose(0, 1).reshape(count, -1))

    def _times(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x @ self.tensors[f"{name}.weight"].T

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        scale = self.tensors[f"{name}.weight"]
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"]) * scale


def make_model_and_head(
    folder: Path,
    head: Path,
    *,
    layers: list[int] | None = LAYERS,
    draft_vocab: int | None = 150,
    norms: tuple[str, ...] = (),
    **changes: Any,
) -> TorchEagle3:
    """Save a tiny model and a random head for it.

    Args:
        layers: those that the head's config names; None = it names none.
        draft_vocab: tokens in the head's vocabulary; None = all.
        norms: fields of its config that say of further norms.
        changes: of the model's config.
    """
    model = make_checkpoint("llama", folder, **changes)
    size, vocab = model.config.hidden_size, model.config.vocab_size
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": size,
        "intermediate_size": 101,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_hidden_layers": 1,
        "vocab_size": vocab,
        "rms_norm_eps": 1e-5,
        "rope_theta": 2e4,
        "tie_word_embeddings": False,
    }
    config |= dict.fromkeys(norms, True)
    if draft_vocab is not None:
        config["draft_vocab_size"] = draft_vocab
    if layers is not None:
        config["eagle_aux_hidden_state_layer_ids"] = layers
    torch.manual_seed(9)
    shapes = {
        "fc": (size, 3 * size),
        "midlayer.self_attn.q_proj": (128, 2 * size),
        "midlayer.self_attn.k_proj": (64, 2 * size),
        "midlayer.self_attn.v_proj": (64, 2 * size),
        "midlayer.self_attn.o_proj": (size, 128),
        "midlayer.mlp.gate_proj": (101, size),
        "midlayer.mlp.up_proj": (101, size),
        "midlayer.mlp.down_proj": (size, 101),
        "lm_head": (draft_vocab or vocab, size),
    }
    of_layer = [f"midlayer.{n}" for n in ("input_layernorm", "hidden_norm", "post_attention_layernorm")]
    tensors = {f"{name}.weight": torch.randn(shape) * shape[-1] ** -0.5 for name, shape in shapes.items()}
    tensors["lm_head.weight"] *= 3
    tensors |= {f"{name}.weight": 1 + 0.2 * torch.randn(size) for name in (*of_layer, "norm")}
    if "norm_before_fc" in norms:
        tensors["input_norm.weight"] = 1 + 0.2 * torch.randn(3 * size)
    if "fc_norm" in norms:
        tensors |= {f"fc_norm.{number}.weight": 1 + 0.2 * torch.randn(size) for number in range(3)}
    if draft_vocab is not None:
        tokens = torch.randperm(vocab)[:draft_vocab].sort().values
        tensors["d2t"] = tokens - torch.arange(draft_vocab)
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, tokens, True)
    head.mkdir(parents=True)
    (head / "config.json").write_text(json.dumps(config))
    save_file(tensors, head / FILE, metadata={"format": "pt"})
    number = model.config.num_hidden_layers
    return TorchEagle3(model, tensors, config, layers or [2, number // 2, number - 3])
