"""Folders of DFlash drafters, and transformers' version of such a drafter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from checkpoints import make_checkpoint
from mtp_checkpoint import FILE
from safetensors.torch import save_file
from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel
from transformers.cache_utils import DFlashCache

AFTER = [0, 2]
"""Layers of a model of three whose results are read."""
MASK = 207


class TorchDFlash:
    """transformers' drafter, whose layers are Qwen3's, on a model of transformers."""

    def __init__(self, model, drafter, config: dict[str, Any]):
        self.model = model
        self.drafter = drafter
        self.config = config

    @torch.no_grad()
    def within(self, tokens: torch.Tensor) -> torch.Tensor:
        """The states that leave the layers, side by side; those of the last one before the final norm."""
        found, hooks = {}, []
        for number in self.config["dflash_config"]["target_layer_ids"]:

            def note(_, __, out, number=number):
                found[number] = (out[0] if isinstance(out, tuple) else out).reshape(len(tokens), -1)

            hooks.append(self.model.model.layers[number].register_forward_hook(note))
        self.model.model(tokens[None])
        for hook in hooks:
            hook.remove()
        return torch.cat(list(found.values()), dim=-1)

    @torch.no_grad()
    def logits(self, token_ids: list[int], number: int) -> torch.Tensor:
        """Return the logits of so many drafts after a sequence."""
        cache = DFlashCache(config=self.drafter.config)
        cache.activate_past_recording()
        cache.set_previous_accepted_tokens(len(token_ids) - 1)
        block = torch.tensor([token_ids[-1], *[MASK] * number])
        out = self.drafter(
            noise_embeds=self.model.model.embed_tokens(block)[None],
            context_hidden_states=self.within(torch.tensor(token_ids[:-1]))[None],
            position_ids=torch.arange(len(token_ids) + number)[None],
            cache=cache,
        )
        return self.model.lm_head(out.last_hidden_state[0, 1:])

    def drafts(self, token_ids: list[int], number: int) -> list[int]:
        """The most likely tokens after a sequence, as the drafter sees them together."""
        return self.logits(token_ids, number).argmax(-1).tolist()


def make_model_and_drafter(
    folder: Path, head: Path, *, family: str = "llama", layers: int = 2, after: list[int] | None = None, **changes: Any
) -> TorchDFlash:
    """Save a tiny model and a random drafter for it.

    Args:
        layers: number of the drafter's layers.
        after: layers of the model whose results it reads.
        changes: of the model's config.
    """
    model = make_checkpoint(family, folder, **changes)
    size, vocab = model.config.hidden_size, model.config.vocab_size
    common = {
        "hidden_size": size,
        "intermediate_size": 101,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_hidden_layers": layers,
        "rms_norm_eps": 1e-5,
        "block_size": 8,
    }
    config = common | {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "vocab_size": vocab,
        "rope_theta": 2e4,
        "tie_word_embeddings": False,
        "num_target_layers": model.config.num_hidden_layers,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": after or AFTER},
    }
    torch.manual_seed(9)
    drafter = MuseGlimmerAssistantModel(
        MuseGlimmerAssistantConfig(
            **common,
            layer_types=["full_attention"] * layers,
            rope_parameters={"rope_type": "default", "rope_theta": 2e4},
            mask_token_id=MASK,
            target_layer_ids=after or AFTER,
        )
    ).eval()
    for name, tensor in drafter.named_parameters():
        noise = torch.randn(tensor.shape)
        tensor.data = 1 + 0.2 * noise if "norm" in name else noise * tensor.shape[-1] ** -0.5
    renamed = {"encoder.fc": "fc", "encoder.output_norm_enc": "hidden_norm"}
    tensors = {}
    for name, tensor in drafter.state_dict().items():
        part = next((old for old in renamed if name.startswith(old)), None)
        tensors[name if part is None else renamed[part] + name.removeprefix(part)] = tensor.contiguous()
    head.mkdir(parents=True, exist_ok=True)
    (head / "config.json").write_text(json.dumps(config))
    save_file(tensors, head / FILE, metadata={"format": "pt"})
    return TorchDFlash(model, drafter, config)
