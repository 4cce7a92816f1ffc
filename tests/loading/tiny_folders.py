"""A tiny random Llama as a Hugging Face folder, with the demo model's tokenizer."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from jpaged.loading.gguf.reader import GGUFFile
from jpaged.loading.gguf.tokenizer import tokenizer_from_gguf
from jpaged.loading.source import resolve_source
from jpaged.loading.tokenizer import as_transformers


def write_llama(folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Six query heads on two KV heads: four shards need replicas and padding."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=211,
        hidden_size=48,
        intermediate_size=50,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,
        eos_token_id=[2, 5],
    )
    LlamaForCausalLM(config).to(dtype).save_pretrained(folder)
    as_transformers(tokenizer_from_gguf(GGUFFile(resolve_source("smollm2-135m").path))).save_pretrained(folder)
    return folder
