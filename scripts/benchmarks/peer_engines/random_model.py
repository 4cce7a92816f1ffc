"""Writes a model of random weights to measure its speed: python random_model.py dense|moe|windows TOKENIZER FOLDER

"dense" has the shape of a Qwen3 of 0.93B parameters, "moe" the proportions of Qwen3-30B-A3B at 1.1B: 128 experts, of
which a token takes eight. "windows" is a Gemma 3 of 0.05B: five layers with a window of 128 to one that sees all.
Weights are bfloat16. TOKENIZER is a Hugging Face folder whose tokenizer is copied.
"""

import sys

import torch
from transformers import (
    AutoTokenizer,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

shape, tokenizer, folder = sys.argv[1:]
torch.manual_seed(0)
shared = {
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
if shape == "dense":
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "rope_theta": 1e6}
    model = Qwen3ForCausalLM(
        Qwen3Config(hidden_size=1536, intermediate_size=4608, num_hidden_layers=28, **heads, **shared)
    )
elif shape == "moe":
    heads = {"num_attention_heads": 12, "num_key_value_heads": 2, "head_dim": 128, "rope_theta": 1e6}
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 288, "norm_topk_prob": True}
    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(hidden_size=768, intermediate_size=2304, num_hidden_layers=12, **heads, **experts, **shared)
    )
elif shape == "windows":
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "query_pre_attn_scalar": 64}
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 12, "sliding_window": 128}
    model = Gemma3ForCausalLM(Gemma3TextConfig(**sizes, **heads, **shared))
else:
    sys.exit(f"{shape} is none of dense, moe and windows")
model.to(torch.bfloat16).save_pretrained(folder, max_shard_size="8GB")
AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)
print(f"{sum(parameter.numel() for parameter in model.parameters()) / 1e9:.2f}B parameters in {folder}")
