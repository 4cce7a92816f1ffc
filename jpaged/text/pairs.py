"""Joins two texts into one prompt, for models that score pairs: as the tokenizer joins them, or as a question."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jpaged.text.chat_template import ChatOptions, ContentFormat, templated
from jpaged.text.long_text import TokenBound, beginning, encode_bounded, part_for_pair
from jpaged.text.prompt import Prompt, Tokenization
from jpaged.text.tokenizer_errors import errors_of
from jpaged.validation import check_unicode


def pair_prompts(
    first: Sequence[Prompt],
    second: Sequence[Prompt],
    tokenizer: Any,
    tokenization: Tokenization,
    *,
    vocab_size: int = 0,
    token_types: int = 1,
    most: int | None = None,
    bound: TokenBound,
    names: Sequence[str],
) -> list[Prompt]:
    """Return a prompt of token ids for each pair, joined as the tokenizer joins two texts.

    Args:
        first, second: the first and the second texts, the same number of each.
        tokenizer: a transformers tokenizer; None where the model has none.
        vocab_size, token_types: if the model has more than one token type, and the tokenizer's `model_input_names` do
            not leave them out, the ids of the second text's tokens are raised by `vocab_size`, see
            `jpaged.model_api.PromptEncoder`.
        most: most tokens of a pair: the longer text is cut until the pair fits; None = pairs are not cut.
        bound: limit on the tokens of a pair that is not cut, so that a text far above it is not tokenized whole.
        names: how errors name the pairs.

    Raises:
        ValueError: there is no tokenizer; a prompt is not text (only the tokenizer knows which tokens join two texts);
            or a text alone has more tokens than a pair may have. The last two messages name the pair or its text.
    """
    if tokenizer is None:
        raise ValueError("the model has no tokenizer, which joins the texts of a pair")
    taken = getattr(tokenizer, "model_input_names", None)
    typed = token_types > 1 and (taken is None or "token_type_ids" in taken)
    special = tokenization.add_special_tokens
    options: dict[str, Any] = {} if special is None else {"add_special_tokens": special}
    if most is not None and tokenization.max_length is None:
        options |= {"truncation": True, "max_length": most}
    prompts: list[Prompt] = []
    for i, (both, given) in enumerate(zip(_both(first, second), first, strict=True)):
        if "max_length" in options:  # the longer text loses its end until both fit, so no more of either counts
            one, other = (beginning(tokenizer, text, False, options["max_length"]) for text in both)
        else:
            try:
                one, other = (part_for_pair(tokenizer, text, bound) for text in both)
            except ValueError as error:
                raise ValueError(f"{names[i]}: {error}") from error
        with errors_of(tokenizer):
            pair = tokenizer(one, other, return_token_type_ids=typed, **options)
        ids = pair["input_ids"]
        if typed:
            ids = [token + kind * vocab_size for token, kind in zip(ids, pair["token_type_ids"], strict=True)]
        prompts.append({"prompt_token_ids": ids, **_salt(given)})
    return prompts


def judged_prompts(
    first: Sequence[Prompt],
    second: Sequence[Prompt],
    tokenizer: Any,
    tokenization: Tokenization,
    *,
    instruction: str | None = None,
    add_generation_prompt: bool = True,
    variables: Mapping[str, Any] | None = None,
    most: int,
    names: Sequence[str],
) -> list[Prompt]:
    """Return a prompt of token ids for each pair, which asks whether the second text, a document, answers the first.

    Both are messages of the roles ``query`` and ``document`` of the chat template, as sentence-transformers has them.
    Where the template shows no such messages, and the tokenizer has ChatML's tokens, they become the prompt that
    Qwen3-Reranker was published with.

    Args:
        first, second, tokenizer: see `pair_prompts`.
        instruction: the system message; None = there is none, so that the template has its own.
        add_generation_prompt, variables: of the chat template.
        most: most tokens of a prompt, which is not cut: it ends with the question.
        names: see `pair_prompts`.

    Raises:
        ValueError: as `pair_prompts`; or the prompt is to be cut, is too long, or has no template.
    """
    if tokenizer is None:
        raise ValueError("the model has no tokenizer, which a chat template needs")
    if tokenization.max_length is not None:
        raise ValueError(
            f"tokenization_kwargs has max_length={tokenization.max_length}: a reranker's prompt is not cut, as it ends "
            "with the question"
        )
    options = ChatOptions(add_generation_prompt=add_generation_prompt, chat_template_kwargs=variables)
    options = _for_pairs(tokenizer, options)
    before = [] if instruction is None else [{"role": "system", "content": instruction}]
    prompts: list[Prompt] = []
    for i, ((query, document), given) in enumerate(zip(_both(first, second), first, strict=True)):
        bound = TokenBound(most)
        try:
            text = templated([*before, *_pair(query, document)], tokenizer, options)
            ids = encode_bounded(tokenizer, text, bool(tokenization.add_special_tokens), bound)
            if len(ids) > most:
                raise ValueError(f"the prompt has {len(ids)} tokens, above the limit of {most} for a pair")
        except ValueError as error:
            raise ValueError(f"{names[i]}: {error}") from error
        prompts.append({"prompt_token_ids": ids, **_salt(given)})
    return prompts


_QWEN3_RERANKER = """\
{%- set said = messages | selectattr("role", "eq", "system") | map(attribute="content") | first -%}
<|im_start|>system
Judge whether the Document meets the requirements based on the Query and the Instruct provided. \
Note that the answer can only be "yes" or "no".<|im_end|>
<|im_start|>user
<Instruct>: {{ said or "Given a web search query, retrieve relevant passages that answer the query" }}
<Query>: {{ messages | selectattr("role", "eq", "query") | map(attribute="content") | first }}
<Document>: {{ messages | selectattr("role", "eq", "document") | map(attribute="content") | first }}<|im_end|>
<|im_start|>assistant
<think>

</think>

{{ "" }}"""
"""The prompt of Qwen3-Reranker's model card (Zhang et al., 2025)."""
_TRIED = "a query that none asks", "a document of no content"


def _pair(query: str, document: str) -> list[dict[str, str]]:
    return [{"role": "query", "content": query}, {"role": "document", "content": document}]


def _for_pairs(tokenizer: Any, options: ChatOptions) -> ChatOptions:
    """Return the options with which both messages of a pair are in the prompt.

    Raises:
        ValueError: no template shows them.
    """
    forms: tuple[ContentFormat, ...] = ("string", "openai")
    for form in forms if tokenizer.chat_template else ():
        tried = replace(options, chat_template_content_format=form)
        try:
            shown = templated(_pair(*_TRIED), tokenizer, tried)
        except ValueError:  # templates raise where a role or a form of content is unknown
            continue
        if all(shown.count(text) == 1 for text in _TRIED):
            return tried
    if len(tokenizer.encode("<|im_start|>", add_special_tokens=False)) == 1:
        return ChatOptions(chat_template=_QWEN3_RERANKER, chat_template_content_format="string")
    raise ValueError(
        "the chat template shows no messages of the roles 'query' and 'document', which are the texts of a pair: give "
        "chat_template="
    )


def _salt(given: Prompt) -> dict[str, str]:
    """Return the ``cache_salt`` of a pair's first text, if it has one."""
    return {"cache_salt": given["cache_salt"]} if isinstance(given, Mapping) and "cache_salt" in given else {}


def _both(first: Sequence[Prompt], second: Sequence[Prompt]) -> Iterable[tuple[str, str]]:
    return zip(_texts("data_1", first, {"prompt", "cache_salt"}), _texts("data_2", second, {"prompt"}), strict=True)


def _texts(name: str, prompts: Sequence[Prompt], keys: set[str]) -> list[str]:
    """Return the prompts' texts; a mapping may have `keys`. The pair's ``cache_salt`` is that of its first text."""
    texts = []
    for i, prompt in enumerate(prompts):
        named = isinstance(prompt, Mapping) and {"prompt"} <= set(prompt) <= keys
        only = prompt["prompt"] if named else prompt  # type: ignore[index,call-overload]
        if not isinstance(only, str):
            raise ValueError(
                f"{name}[{i}]={prompt!r} must be text: this model reads both texts of a pair as one prompt"
            )
        check_unicode(f"{name}[{i}]", only)
        texts.append(only)
    return texts
