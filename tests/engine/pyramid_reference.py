"""PyramidKV on transformers' Llama in plain torch, one sequence at a time: what jpaged is compared with.

The prompt is computed whole. Then each layer drops what it does not keep from its cache, and generation goes on with
true positions. Budgets are given layer by layer, so that nothing of jpaged's is used.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import LlamaForCausalLM


class _Cache:
    """K and V of each layer, [1, kv_heads, tokens, head_dim], as transformers' attention updates them."""

    def __init__(self, num_layers: int):
        self.kv: list[tuple[torch.Tensor, ...]] = [()] * num_layers

    def update(self, k: torch.Tensor, v: torch.Tensor, layer: int, **others: object) -> tuple[torch.Tensor, ...]:
        """Do as transformers' caches; what else newer versions of its attention tell is for other kinds of layers."""
        old = self.kv[layer]
        self.kv[layer] = tuple(torch.cat(pair, dim=2) for pair in zip(old, (k, v), strict=True)) if old else (k, v)
        return self.kv[layer]


class PyramidReference:
    """Args:
    budgets: tokens of a prompt that each layer keeps.
    sinks, recent, window, pool: see `jpaged.PyramidKV`.
    """

    def __init__(
        self, model: LlamaForCausalLM, budgets: Sequence[int], *, sinks: int, recent: int, window: int, pool: int
    ):
        self.model = model
        self.model.set_attn_implementation("eager")
        self.budgets, self.sinks, self.recent, self.window, self.pool = budgets, sinks, recent, window, pool

    @torch.inference_mode()
    def generate(self, prompt: Sequence[int], num_tokens: int) -> tuple[list[int], torch.Tensor]:
        """Greedy tokens and the logits they were chosen from, [num_tokens, vocab] in double precision."""
        cache = _Cache(len(self.budgets))
        logits, weights = self._forward(torch.tensor([list(prompt)]), 0, cache)
        for layer, budget in enumerate(self.budgets):
            if len(prompt) > budget:
                cache.kv[layer] = self._keep(cache.kv[layer], weights[layer], budget)
        tokens, rows = [int(logits.argmax())], [logits]
        while len(tokens) < num_tokens:
            logits, _ = self._forward(torch.tensor([tokens[-1:]]), len(prompt) + len(tokens) - 1, cache)
            rows.append(logits)
            tokens.append(int(logits.argmax()))
        return tokens, torch.stack(rows).double()

    def _forward(self, ids: torch.Tensor, start: int, cache: _Cache) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Logits after the last token, and the attention weights of each layer, [heads, queries, keys]."""
        decoder = self.model.model
        x, count = decoder.embed_tokens(ids), ids.shape[1]
        positions = torch.arange(start, start + count)[None]
        rotary = decoder.rotary_emb(x, positions)
        causal = torch.full((count, count), -torch.inf).triu(1)[None, None] if count > 1 else None
        weights = []
        for layer in decoder.layers:
            normed = layer.input_layernorm(x)
            mixed, mine = layer.self_attn(
                normed, position_embeddings=rotary, attention_mask=causal, past_key_values=cache
            )
            x = x + mixed
            x = x + layer.mlp(layer.post_attention_layernorm(x))
            weights.append(mine[0])
        return self.model.lm_head(decoder.norm(x[0, -1])), weights

    def _keep(self, kv: tuple[torch.Tensor, ...], weights: torch.Tensor, budget: int) -> tuple[torch.Tensor, ...]:
        """The tokens that each KV head keeps of a layer's whole prompt."""
        kv_heads, count = kv[0].shape[1], weights.shape[-1]
        scores = weights[:, -self.window :].reshape(kv_heads, -1, count).sum(dim=1)
        old = scores[:, : count - self.recent]
        smooth = torch.nn.functional.max_pool1d(old[None], self.pool, stride=1, padding=self.pool // 2)[0]
        best = smooth[:, self.sinks :].argsort(dim=1, descending=True, stable=True) + self.sinks
        top = best[:, : budget - self.sinks - self.recent]
        always = torch.cat([torch.arange(self.sinks), torch.arange(count - self.recent, count)])
        kept = torch.cat([top, always.expand(kv_heads, -1)], dim=1).sort(dim=1).values
        return tuple(part.gather(2, kept[None, :, :, None].expand(-1, -1, -1, part.shape[-1])) for part in kv)
