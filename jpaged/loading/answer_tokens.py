"""Reads rerankers that answer by a token, such as Qwen3-Reranker, as models with a head of one class.

The class' logit is that of the token for "yes" less that of the one for "no", so its sigmoid is the probability of
"yes" among both. No other logit is computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from jpaged.loading.hugging_face import read_json
from jpaged.loading.tensor_reader import TensorReader
from jpaged.loading.tokenizer import AnyTokenizer
from jpaged.loading.vector_layers import VectorLayer, VectorLayers
from jpaged.model_api import CausalLM, PromptEncoder

MODULE = "LogitScore"
"""sentence-transformers' name of the module that scores by tokens."""


@dataclass(frozen=True)
class AnswerTokens:
    """The tokens whose logits are a pair's score, and how the pair becomes a prompt.

    Attributes:
        yes: id of the token for a match.
        no: id of the one for no match; None = the logit of `yes` alone is the score.
        add_generation_prompt, variables: of the chat template, which gets both texts as messages.
    """

    yes: int
    no: int | None = None
    add_generation_prompt: bool = True
    variables: Mapping[str, Any] = field(default_factory=dict)


def answers_of_module(folder: Path, settings: Mapping[str, Any]) -> AnswerTokens | None:
    """Read a LogitScore module; None if it takes pairs that are no messages of a chat template, which is not supported.

    Args:
        folder: the module's.
        settings: the fields of sentence_bert_config.json.

    Raises:
        ValueError: the module names no token.
    """
    fields = read_json(folder / "config.json")
    yes, no = fields.get("true_token_id"), fields.get("false_token_id")
    if not isinstance(yes, int) or not isinstance(no, int | None):
        raise ValueError(f"{folder} has true_token_id={yes!r} and false_token_id={no!r}, which must be token ids")
    if "message" not in (settings.get("modality_config") or {}):
        return None
    template = dict((settings.get("processing_kwargs") or {}).get("chat_template") or {})
    template.pop("restore_suffix", None)  # what to do when a pair is cut, which is refused here
    return AnswerTokens(yes, no, bool(template.pop("add_generation_prompt", False)), template)


def answers_of_texts(tokens: tuple[str, ...], tokenizer: AnyTokenizer | None) -> AnswerTokens:
    """Return the tokens that `EngineConfig.classifier_from_token` names.

    Raises:
        ValueError: there is no tokenizer, or a text is not one token of it.
    """
    if tokenizer is None:
        raise ValueError(f"classifier_from_token={tokens!r} needs a tokenizer, and the model has none")
    ids = []
    for token in tokens:
        found = tokenizer.encode(token, add_special_tokens=False)
        if len(found) != 1:
            raise ValueError(
                f"classifier_from_token has {token!r}, which is {len(found)} tokens of the model; it must be 1"
            )
        ids.append(found[0])
    return AnswerTokens(ids[-1], ids[0] if len(ids) == 2 else None)


def answer_head(reader: TensorReader, model: CausalLM | PromptEncoder, answers: AnswerTokens) -> VectorLayers:
    """Return the head that makes the score of the last token's hidden state.

    Raises:
        ValueError: the model's logits are not the product of hidden states and a table, or it has no such token.
    """
    if isinstance(model, PromptEncoder):
        raise ValueError(f"{reader.location} has no vocabulary's head, from which tokens could be scored")
    for name in ("logit_soft_cap", "logit_scale", "head_bias"):
        if getattr(model, name, None) is not None:
            raise ValueError(f"{reader.location}: scores by tokens are not supported of a model with {name}")
    ids = [answers.yes] if answers.no is None else [answers.yes, answers.no]
    for token in ids:
        if not 0 <= token < model.vocab_size:
            raise ValueError(f"{reader.location}: token id {token} is outside of [0, {model.vocab_size})")
    names = {source.path[0]: source.sources[0] for source in model.weights()}
    table = reader.read(names.get("lm_head", names["embed_tokens"]))
    yes, *no = (np.asarray(table[token : token + 1,]).astype(np.float32) for token in ids)
    return VectorLayers([VectorLayer(yes - no[0] if no else yes)])
