"""Prompts of the tiny encoders in tests/models/encoder_checkpoints.py, and a tokenizer with a word for each token."""

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from jpaged import PoolingParams

RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(3, 211, length).tolist() for length in (1, 30, 17, 61, 16, 2, 33)]
SETTINGS = {"max_num_seqs": 4, "max_num_batched_tokens": 80, "enforce_eager": True}


def prompts(ids=PROMPTS):
    return [{"prompt_token_ids": one} for one in ids]


def vectors(outputs):
    return np.array([output.outputs.embedding for output in outputs])


def hidden_states(model):
    with torch.no_grad():
        return [model(input_ids=torch.tensor([ids])).last_hidden_state[0].numpy() for ids in PROMPTS]


def plain(pooling):
    return PoolingParams(pooling=pooling, normalize=False)


WORDS = ["[UNK]", "[PAD]", "[CLS]", "[SEP]", *(f"w{i}" for i in range(4, 211))]


def text(ids):
    return " ".join(WORDS[token] for token in ids)


def word_tokenizer():
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    special = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)
