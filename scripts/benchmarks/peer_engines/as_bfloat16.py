"""Writes a Hugging Face folder again in bfloat16, as most models are published: python as_bfloat16.py FOLDER TARGET"""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

source, target = sys.argv[1:]
AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).save_pretrained(target)
AutoTokenizer.from_pretrained(source).save_pretrained(target)
