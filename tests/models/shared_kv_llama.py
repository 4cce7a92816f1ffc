"""A Llama with cross-layer KV sharing in plain PyTorch: what jpaged is compared with, as transformers has none.

Of the layers of one type, in order, the first of every ``cla_share_factor`` has K and V; those after it read them.
There is no cache: every call computes all positions, which leaves nothing to go wrong but the formula.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import PretrainedConfig


class _Attention(nn.Module):
    def __init__(self, config: PretrainedConfig, keeps_kv: bool):
        super().__init__()
        size, width = config.hidden_size, config.head_dim
        self.heads, self.kv_heads, self.width = config.num_attention_heads, config.num_key_value_heads, width
        self.q_proj = nn.Linear(size, self.heads * width, bias=False)
        if keeps_kv:
            self.k_proj = nn.Linear(size, self.kv_heads * width, bias=False)
            self.v_proj = nn.Linear(size, self.kv_heads * width, bias=False)
        self.o_proj = nn.Linear(self.heads * width, size, bias=False)

    def kv(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotated keys and values, [kv_heads, tokens, head_dim]."""
        k, v = (proj(x).view(len(x), self.kv_heads, self.width).transpose(0, 1) for proj in (self.k_proj, self.v_proj))
        return _rotated(k), v

    def forward(self, x: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], window: int | None) -> torch.Tensor:
        q = _rotated(self.q_proj(x).view(len(x), self.heads, self.width).transpose(0, 1))
        k, v = (part.repeat_interleave(self.heads // self.kv_heads, dim=0) for part in kv)
        ahead = torch.arange(len(x))[:, None] - torch.arange(len(x))
        seen = (ahead >= 0) & (ahead < (window or len(x)))
        scores = (q @ k.transpose(1, 2) * self.width**-0.5).masked_fill(~seen, -torch.inf)
        return self.o_proj((scores.softmax(-1) @ v).transpose(0, 1).reshape(len(x), -1))


class _MLP(nn.Module):
    def __init__(self, config: PretrainedConfig):
        super().__init__()
        size, width = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(size, width, bias=False)
        self.up_proj = nn.Linear(size, width, bias=False)
        self.down_proj = nn.Linear(width, size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class _Layer(nn.Module):
    def __init__(self, config: PretrainedConfig, keeps_kv: bool):
        super().__init__()
        self.keeps_kv = keeps_kv
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = _Attention(config, keeps_kv)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = _MLP(config)


class SharedKVLlama(nn.Module):
    """Stands in for a transformers model: `forward`, `generate` and `save_pretrained` as far as the tests need them."""

    def __init__(self, config: PretrainedConfig):
        super().__init__()
        self.config = config
        self.generation_config = SimpleNamespace()
        self.types = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
        places = [self.types[:i].count(layer_type) for i, layer_type in enumerate(self.types)]
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.model.layers = nn.ModuleList(_Layer(config, place % config.cla_share_factor == 0) for place in places)
        self.model.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, ids: torch.Tensor) -> SimpleNamespace:
        """Logits of one sequence, [1, tokens, vocab]."""
        hidden = self.model.embed_tokens(ids[0])
        kv = {}
        for layer_type, layer in zip(self.types, self.model.layers, strict=True):
            inside = layer.input_layernorm(hidden)
            if layer.keeps_kv:
                kv[layer_type] = layer.self_attn.kv(inside)
            window = self.config.sliding_window if layer_type == "sliding_attention" else None
            hidden = hidden + layer.self_attn(inside, kv[layer_type], window)
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return SimpleNamespace(logits=self.lm_head(self.model.norm(hidden))[None])

    def generate(self, ids: torch.Tensor, max_new_tokens: int, **_: object) -> SimpleNamespace:
        """Greedy, whatever else is asked for."""
        logits = []
        for _ in range(max_new_tokens):
            logits.append(self(ids).logits[:, -1])
            ids = torch.cat([ids, logits[-1].argmax(-1, keepdim=True)], dim=1)
        return SimpleNamespace(sequences=ids, logits=logits)

    def save_pretrained(self, path: Path | str) -> None:
        self.config.save_pretrained(path)
        save_file(self.state_dict(), Path(path) / "model.safetensors", metadata={"format": "pt"})


def _rotated(x: torch.Tensor) -> torch.Tensor:
    """Rotary embedding with base 10000, [heads, tokens, head_dim]."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[1])[:, None] * 10000.0 ** (-torch.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
