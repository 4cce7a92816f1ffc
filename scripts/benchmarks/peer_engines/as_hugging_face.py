"""Writes a GGUF file's model as a Hugging Face folder in float32: python as_hugging_face.py MODEL.gguf FOLDER"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

source, target = Path(sys.argv[1]), sys.argv[2]
named = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
model = AutoModelForCausalLM.from_pretrained(**named, dtype=torch.float32)
if hasattr(model.config, "quantization_config"):
    del model.config.quantization_config
plain = type(model)(model.config).float()
plain.load_state_dict({name: tensor.float() for name, tensor in model.state_dict().items()})
plain.tie_weights()
plain.save_pretrained(target)
AutoTokenizer.from_pretrained(**named).save_pretrained(target)
