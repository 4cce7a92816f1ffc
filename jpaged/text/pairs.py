"""Two texts made one prompt, as models that score pairs (cross-encoders) read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jpaged.text.prompt import Prompt, Tokenization
from jpaged.validation import check_unicode


def pair_prompts(
    first: Sequence[Prompt], second: Sequence[Prompt], tokenizer: Any, tokenization: Tokenization
) -> list[Prompt]:
    """Return a prompt of token ids for each pair, joined as the tokenizer joins two texts.

    Args:
        first, second: texts, as many of both.
        tokenizer: a transformers tokenizer; None where the model has none.

    Raises:
        ValueError: there is no tokenizer, or a prompt is no text: what stands between two lists of tokens is known to
            the tokenizer only. Names the prompt.
    """
    if tokenizer is None:
        raise ValueError("the model has no tokenizer, which joins the texts of a pair")
    special = tokenization.add_special_tokens
    options = {} if special is None else {"add_special_tokens": special}
    texts = zip(_texts("data_1", first), _texts("data_2", second), strict=True)
    return [{"prompt_token_ids": tokenizer(one, other, **options)["input_ids"]} for one, other in texts]


def _texts(name: str, prompts: Sequence[Prompt]) -> list[str]:
    texts = []
    for i, prompt in enumerate(prompts):
        only = prompt["prompt"] if isinstance(prompt, Mapping) and set(prompt) == {"prompt"} else prompt
        if not isinstance(only, str):
            raise ValueError(
                f"{name}[{i}]={prompt!r} must be text: this model reads both texts of a pair as one prompt"
            )
        check_unicode(f"{name}[{i}]", only)
        texts.append(only)
    return texts
