"""Writes a GGUF file's model as a Hugging Face folder in float32: python as_hugging_face.py MODEL.gguf FOLDER"""

import sys
from pathlib import Path

from gguf import GGUFReader
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer


def tokenizer_of(source: Path):
    """Return the file's tokenizer, with SmolLM's split of digits, which transformers leaves out."""
    tokenizer = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
    named = GGUFReader(source).fields.get("tokenizer.ggml.pre")
    if named is not None and named.contents() == "smollm":
        cuts = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    return tokenizer


def write(source: Path, target: str) -> None:
    """Write model and tokenizer to a folder."""
    import torch

    named = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    model = AutoModelForCausalLM.from_pretrained(**named, dtype=torch.float32)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    plain = type(model)(model.config).float()
    plain.load_state_dict({name: tensor.float() for name, tensor in model.state_dict().items()})
    plain.tie_weights()
    plain.save_pretrained(target)
    tokenizer_of(source).save_pretrained(target)


if __name__ == "__main__":
    write(Path(sys.argv[1]), sys.argv[2])
