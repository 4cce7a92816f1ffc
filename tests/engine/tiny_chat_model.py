"""A tiny random Llama with a tokenizer of its own, whose every token is readable."""

from __future__ import annotations

import itertools
import json
import string
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SPECIAL = ("<pad>", "<s>", "</s>")
VOCAB_SIZE = 211
END_PROMPT = [50, 60, 70]
"""Its greedy continuation holds the second end-of-sequence token."""

CHAT_TEMPLATE = (
    "{% for message in messages %}<s>{{ message.role }}: {{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)


def make_chat_model(folder: Path, seed: int = 0) -> tuple[PreTrainedModel, int]:
    """Saves model and tokenizer; returns the model and the id of the end-of-sequence token it likes to draw."""
    from checkpoints import make_checkpoint  # torch, which the tokenizers here can do without
    from greedy_reference import torch_greedy

    model = make_checkpoint("llama", folder, seed)
    tokenizer().save_pretrained(folder)
    end = torch_greedy(model, [END_PROMPT], 8)[0].tokens[5]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, end]}))
    return model, end


def tokenizer() -> PreTrainedTokenizerFast:
    """Printable ASCII, pairs of letters merged, and three special tokens: 211 in all."""
    characters = [c for c in string.printable if c.isprintable()]
    room = VOCAB_SIZE - len(SPECIAL) - len(characters)
    merges = list(itertools.islice(itertools.product(string.ascii_lowercase, repeat=2), room))
    pieces = [*SPECIAL, *characters, *(a + b for a, b in merges)]
    backend = Tokenizer(BPE({piece: i for i, piece in enumerate(pieces)}, merges))
    backend.decoder = Fuse()
    backend.add_special_tokens([AddedToken(piece, special=True) for piece in SPECIAL])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    """The same tokens, decoded as those of most models are."""
    made = json.loads(tokenizer().backend_tokenizer.to_str())
    vocab = made["model"]["vocab"]
    vocab["Ġ"] = vocab.pop(" ")
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    made |= {"decoder": byte_level, "pre_tokenizer": byte_level}
    backend = Tokenizer.from_str(json.dumps(made))
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    fast.chat_template = CHAT_TEMPLATE
    return fast
