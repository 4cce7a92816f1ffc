"""Folders of Gemma 4 assistants; transformers' classes judge them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from checkpoints import make_checkpoint
from transformers import (
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4TextConfig,
    Gemma4UnifiedAssistantConfig,
    Gemma4UnifiedAssistantForCausalLM,
    Gemma4UnifiedTextConfig,
)

VOCAB = 212
KINDS = ("sliding_attention", "full_attention")
SAME = ("vocab_size", "sliding_window", "max_position_embeddings")
"""Fields that the text models of the model and of its assistant have in common."""
OTHER = {
    "hidden_size": 64,
    "intermediate_size": 101,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
}


class TorchAssistant:
    """transformers' assistant on transformers' model, each draft from the states and KV of the sequence so far."""

    def __init__(self, model: Any, assistant: Any):
        self.model = model
        self.assistant = assistant

    @torch.no_grad()
    def seen(self, token_ids: list[int]) -> tuple[torch.Tensor, dict[str, tuple[torch.Tensor, torch.Tensor]]]:
        """Return the model's final state of the token before the newest and the KV that drafts see, by layers' type."""
        tokens = torch.tensor([token_ids[:-1]])
        out = self.model.model(tokens, return_shared_kv_states=True, use_cache=False)
        window = self.model.config.sliding_window - 1  # what the newest token's query sees, but for itself
        kept = {
            kind: tuple(part[:, :, -window:] if kind == "sliding_attention" else part for part in parts)
            for kind, parts in out.shared_kv_states.items()
        }
        return out.last_hidden_state[:, -1:], kept

    @torch.no_grad()
    def logits(self, token_ids: list[int], number: int) -> list[torch.Tensor]:
        """Return the assistant's logits of the tokens after a sequence, if the most likely ones are drafted."""
        (hidden, kept), newest, found = self.seen(token_ids), token_ids[-1], []
        for _ in range(number):
            embedded = self.model.model.embed_tokens(torch.tensor([[newest]]))
            drawn = self.assistant(
                inputs_embeds=torch.cat([embedded, hidden], dim=-1),
                position_ids=torch.tensor([[len(token_ids) - 1]]),
                shared_kv_states=kept,
            )
            hidden = drawn.last_hidden_state
            found.append(drawn.logits[0, 0])
            newest = int(found[-1].argmax())
        return found

    def drafts(self, token_ids: list[int], number: int) -> list[int]:
        """The most likely tokens after a sequence, whose newest one the model has not computed."""
        return [int(logits.argmax()) for logits in self.logits(token_ids, number)]


def make_model_and_assistant(
    folder: Path, head: Path, *, ordered: bool = True, text: dict[str, Any] | None = None, **changes: Any
) -> TorchAssistant:
    """Save a tiny model and a random assistant for it.

    Args:
        ordered: whether only tokens of some clusters can be drafted.
        text, changes: of the config of the assistant's text model, and of the assistant's.
    """
    model = make_checkpoint("gemma4", folder, vocab_size=VOCAB, vocab_size_per_layer_input=VOCAB)
    return TorchAssistant(model, make_assistant(model.config, head, ordered=ordered, text=text, **changes))


def make_assistant(
    own: Any, head: Path, *, ordered: bool = True, text: dict[str, Any] | None = None, **changes: Any
) -> Any:
    """Save a random assistant of a model whose text config is `own`; for the others see `make_model_and_assistant`."""
    is_unified = own.model_type == "gemma4_unified_text"
    kinds: tuple[Any, Any, Any] = Gemma4TextConfig, Gemma4AssistantConfig, Gemma4AssistantForCausalLM
    if is_unified:
        kinds = Gemma4UnifiedTextConfig, Gemma4UnifiedAssistantConfig, Gemma4UnifiedAssistantForCausalLM
    text_config, whole_config, assistant_model = kinds
    others = {name: size for name, size in OTHER.items() if not (is_unified and name.endswith("per_layer_input"))}
    slides, sees_all = (
        own.per_layer_config[own.layer_types.index(f"{kind}_attention")] for kind in ("sliding", "full")
    )
    config = whole_config(
        text_config=text_config(
            **{name: getattr(own, name) for name in SAME}
            | {"num_key_value_heads": slides.num_key_value_heads, "head_dim": slides.head_dim}
            | {"global_head_dim": sees_all.head_dim}
            | others
            | (text or {})
        ),
        **{
            "backbone_hidden_size": own.hidden_size,
            "use_ordered_embeddings": ordered,
            "num_centroids": own.vocab_size // 4,
            "centroid_intermediate_top_k": 20,
        }
        | changes,
    )
    torch.manual_seed(9)
    assistant = assistant_model._from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for key, weight in assistant.named_parameters():
            centre = 0.4 if key.endswith("q_norm.weight") else 1.0
            weight.normal_(*((0.0, weight.shape[1] ** -0.5) if weight.ndim > 1 else (centre, 0.2)))
        for key, buffer in assistant.named_buffers():
            if key.endswith("layer_scalar"):
                buffer.normal_(1.0, 0.2)
            if key.endswith("token_ordering"):
                buffer.copy_(torch.randperm(own.vocab_size))
    assistant.save_pretrained(head)
    return assistant.eval()
