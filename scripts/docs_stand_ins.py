"""Writes tiny random checkpoints under the names of models that the documentation takes from a hub.

    python scripts/docs_stand_ins.py FOLDER          those that are not the demo model
    python scripts/docs_stand_ins.py FOLDER --demo   the demo model too

They have the demo model's tokenizer. A script that runs in FOLDER finds them instead of the hub's. PyTorch makes them.
"""

from __future__ import annotations

import argparse
from pathlib import Path

DEMO = "smollm2-135m"
HUB = ("Qwen/Qwen3-Embedding-0.6B",)
"""What blocks of Python give to `LLM`."""
SHELL = ("Qwen/Qwen3-0.6B",)
"""What commands are given."""


def write(folder: Path, *names: str) -> None:
    """Write a tiny Llama into each of the folders of these names."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from jpaged.loading import demo_model
    from jpaged.loading.gguf.reader import GGUFFile
    from jpaged.loading.gguf.tokenizer import tokenizer_from_gguf
    from jpaged.loading.tokenizer import as_transformers

    tokenizer = as_transformers(tokenizer_from_gguf(GGUFFile(demo_model.fetch_demo_model())))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=2048,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    for name in names:
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--demo", action="store_true")
    given = parser.parse_args()
    write(given.folder, *HUB, *SHELL, *((DEMO,) if given.demo else ()))
