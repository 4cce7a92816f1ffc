"""Turns text into token ids and back with the `tokenizers` library alone.

`Tokenizer` has the methods of a transformers tokenizer that jpaged uses, with the same results; importing transformers
takes seconds. Both can be given wherever jpaged takes a tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import tokenizers
from tokenizers import AddedToken, Encoding

from jpaged.text.tokenizer_errors import errors_of

ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Roles of special tokens that all tokenizers know; a model may have others, such as "image_token"."""
NO_LIMIT = int(1e30)
"""`Tokenizer.model_max_length` where the tokenizer's files name none; transformers' number."""

_LONG = 2**14
"""Characters of texts that the library encodes without Python's lock, which other threads wait for: about 10 ms."""
_CLEANED_UP = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")
"""These lose their spaces, in this order, in a text that is cleaned up."""


class Tokenizer:
    """A `tokenizers.Tokenizer` with the roles of its special tokens and a chat template.

    It changes nothing of the library's object after it was made, so any number of threads may use it.

    Args:
        backend: the library's tokenizer; its truncation and padding are turned off.
        special_tokens: special tokens by role, see `ROLES`; those that the backend does not match whole are added.
        extra_special_tokens: special tokens without a role.
        chat_template: a Jinja template, or several by name, of which "default" and "tool_use" are chosen among.
        model_max_length: the most tokens that the tokenizer's makers name.
        clean_up: whether decoding takes out spaces before punctuation.
        truncation_side: the end at which texts are cut.
        class_name: the transformers class that reads the same files.
        name_or_path: the file or folder that it was read from.
        model_input_names: what a model takes, where the files say it; without "token_type_ids" it takes no number
            of the text of a pair that a token belongs to. None = they do not say it.
        response_template: how the files say that answers are read, see `jpaged.answers.response_template`.

    Attributes:
        chat_template: as given; may be changed.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str | AddedToken],
        extra_special_tokens: Sequence[str | AddedToken] = (),
        chat_template: str | Mapping[str, str] | None = None,
        model_max_length: int = NO_LIMIT,
        clean_up: bool = False,
        truncation_side: Literal["left", "right"] = "right",
        class_name: str = "TokenizersBackend",
        name_or_path: str = "",
        model_input_names: Sequence[str] | None = None,
        response_template: Mapping[str, Any] | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        special_tokens = {role: special_tokens[role] for role in (*ROLES, *special_tokens) if role in special_tokens}
        _add_missing(backend, special_tokens.values(), extra_special_tokens)
        self.backend_tokenizer = backend
        self.special_tokens_map = {role: _text(token) for role, token in special_tokens.items()}
        self.chat_template = chat_template
        self.response_template = response_template
        self.model_max_length = model_max_length
        self.clean_up_tokenization_spaces = clean_up
        # transformers' name of a setting that is on here only if `clean_up` holds for this tokenizer
        self.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output = clean_up
        self.class_name = class_name
        self.name_or_path = name_or_path
        self.model_input_names = model_input_names
        special = [*special_tokens.values(), *extra_special_tokens]
        self.all_special_tokens = list(dict.fromkeys(map(_text, special)))
        self._truncation_side = truncation_side
        self._errors = errors_of(self)

    # ------------------------------------------------------------------ tokens

    def __len__(self) -> int:
        """Return the number of tokens, with those that were added to the vocabulary."""
        return self.backend_tokenizer.get_vocab_size(with_added_tokens=True)

    def __bool__(self) -> bool:
        return True

    def get_vocab(self) -> dict[str, int]:
        """Return the ids of all tokens."""
        return self.backend_tokenizer.get_vocab(with_added_tokens=True)

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        """Return the tokens that are matched whole, by id."""
        return self.backend_tokenizer.get_added_tokens_decoder()

    @property
    def bos_token(self) -> str | None:
        return self.special_tokens_map.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        return self.special_tokens_map.get("eos_token")

    @property
    def unk_token(self) -> str | None:
        return self.special_tokens_map.get("unk_token")

    @property
    def pad_token(self) -> str | None:
        return self.special_tokens_map.get("pad_token")

    @property
    def bos_token_id(self) -> int | None:
        return self._id_of(self.bos_token)

    @property
    def eos_token_id(self) -> int | None:
        return self._id_of(self.eos_token)

    @property
    def unk_token_id(self) -> int | None:
        return None if self.unk_token is None else self.backend_tokenizer.token_to_id(self.unk_token)

    @property
    def pad_token_id(self) -> int | None:
        return self._id_of(self.pad_token)

    @property
    def all_special_ids(self) -> list[int | None]:
        """Return the ids of `all_special_tokens`."""
        return [self._id_of(token) for token in self.all_special_tokens]

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """Return a token's id, or those of several; the unknown token's for a text that is no token."""
        return self._id_of(tokens) if isinstance(tokens, str) else [self._id_of(token) for token in tokens]

    def convert_ids_to_tokens(self, ids: int | Iterable[int]) -> Any:
        """Return the token of an id, or those of several; None for an id without one."""
        if isinstance(ids, int):
            return self.backend_tokenizer.id_to_token(ids)
        return [self.backend_tokenizer.id_to_token(int(token)) for token in ids]

    def _id_of(self, token: str | None) -> int | None:
        if token is None:
            return None
        found = self.backend_tokenizer.token_to_id(token)
        return self.unk_token_id if found is None else found

    # ------------------------------------------------------------------ text to ids

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text, by default with the tokens that texts begin or end with."""
        with self._errors:
            if len(text) < _LONG:
                return self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
            return self.backend_tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def __call__(
        self,
        text: str,
        text_pair: str | None = None,
        *,
        add_special_tokens: bool = True,
        truncation: bool = False,
        max_length: int | None = None,
        return_offsets_mapping: bool = False,
        return_token_type_ids: bool = False,
    ) -> dict[str, Any]:
        """Return the ids of a text or a pair of texts, under "input_ids".

        Args:
            text_pair: the second text; an empty one counts as none, as with transformers.
            truncation, max_length: True with a length cuts the texts, of a pair the longer one, until the ids are at
                most so many.
            return_offsets_mapping: return where each token begins and ends in its text, under "offset_mapping".
            return_token_type_ids: return which text each token belongs to, under "token_type_ids".

        Raises:
            ValueError: `truncation` without `max_length` or the reverse, or a `max_length` that has no place for the
                tokens around the texts.
        """
        if truncation != (max_length is not None):
            raise ValueError(f"truncation={truncation} with max_length={max_length}: a cut needs both, else give none")
        text_pair = text_pair or None
        if max_length is None:
            found = self._encoding(text, text_pair, add_special_tokens)
        else:
            found = self._cut(text, text_pair, add_special_tokens, max_length)
        made: dict[str, Any] = {"input_ids": found.ids}
        if return_token_type_ids:
            made["token_type_ids"] = found.type_ids
        if return_offsets_mapping:
            made["offset_mapping"] = found.offsets
        return made

    def _encoding(self, text: str, text_pair: str | None, special: bool) -> Encoding:
        """Encode texts with all that the library tells of them; of long ones it lets other threads run meanwhile."""
        with self._errors:
            if len(text) + len(text_pair or "") < _LONG:
                return self.backend_tokenizer.encode(text, text_pair, add_special_tokens=special)
            texts = text if text_pair is None else (text, text_pair)
            return self.backend_tokenizer.encode_batch([texts], add_special_tokens=special)[0]

    def _cut(self, text: str, text_pair: str | None, special: bool, most: int) -> Encoding:
        """Encode texts and cut them to `most` tokens.

        The library's own truncation is a state of its object, which other threads would see.
        """
        backend, pair = self.backend_tokenizer, text_pair is not None
        around = backend.num_special_tokens_to_add(pair) if special else 0
        if most < around:
            raise ValueError(f"max_length={most} has no place for the {around} tokens around a text")
        first = self._encoding(text, None, False)
        second = None if text_pair is None else self._encoding(text_pair, None, False)
        kept = _longest_first(len(first), 0 if second is None else len(second), most - around)
        first.truncate(kept[0], direction=self._truncation_side)
        if second is not None:
            second.truncate(kept[1], direction=self._truncation_side)
        with self._errors:
            return backend.post_process(first, second, add_special_tokens=special)

    # ------------------------------------------------------------------ ids to text

    def decode(self, token_ids: int | Iterable[int], skip_special_tokens: bool = False, **forms: bool) -> str:
        """Return the text of ids.

        Args:
            skip_special_tokens: leave special tokens out.
            forms: "spaces_between_special_tokens", which has no effect: these tokenizers put none there.

        Raises:
            TypeError: `forms` has something else.
        """
        if unknown := forms.keys() - {"spaces_between_special_tokens"}:
            raise TypeError(f"decode() takes no {', '.join(sorted(unknown))}")
        ids = [token_ids] if isinstance(token_ids, int) else [int(token) for token in token_ids]
        with self._errors:
            text = self.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return self.clean_up_tokenization(text) if self.clean_up_tokenization_spaces else text

    @staticmethod
    def clean_up_tokenization(text: str) -> str:
        """Return a text without the spaces before punctuation and English contractions."""
        for spaced in _CLEANED_UP:
            text = text.replace(spaced, spaced.strip())
        return text

    # ------------------------------------------------------------------ conversations

    def get_chat_template(self, chat_template: str | None = None, tools: Sequence[Any] | None = None) -> str:
        """Return a template: the given text, the one of that name, or the model's for calls with or without tools.

        Raises:
            ValueError: the model has none, or several of which none is the default.
        """
        known = self.chat_template
        if not isinstance(known, Mapping):
            found = chat_template if chat_template is not None else known
            if found is None:
                raise ValueError("the model has no chat template")
            return found
        if chat_template is not None:
            return known.get(chat_template, chat_template)
        name = "tool_use" if tools is not None and "tool_use" in known else "default"
        if name not in known:
            raise ValueError(f"the model has the chat templates {sorted(known)} and none of them is the default")
        return known[name]

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Any] | None = None,
        documents: Sequence[Any] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: Literal[False] = False,
        **variables: Any,
    ) -> str:
        """Return a conversation as text; see `jpaged.text.template_rendering.render`.

        Raises:
            ValueError: there is no message or no template, both `add_generation_prompt` and `continue_final_message`
                are True, or `tokenize` is: transformers' method of this name returns ids then.
        """
        # Jinja takes 0.1 s to import, and a model that only completes texts does not need it.
        from jpaged.text.template_rendering import render

        if tokenize:
            raise ValueError("tokenize=True is not supported: encode the text with add_special_tokens=False")
        if not conversation:
            raise ValueError(f"conversation={conversation!r} has no message; at least 1 is needed")
        if add_generation_prompt and continue_final_message:
            raise ValueError("add_generation_prompt=True and continue_final_message=True exclude each other")
        return render(
            self.get_chat_template(chat_template, tools),
            conversation,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables={**self.special_tokens_map, **variables},
        )


def _text(token: str | AddedToken) -> str:
    return token if isinstance(token, str) else token.content


def _add_missing(
    backend: tokenizers.Tokenizer, with_role: Iterable[str | AddedToken], others: Iterable[str | AddedToken]
) -> None:
    """Let a tokenizer match special tokens whole which it does not yet."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    missing: dict[str, AddedToken] = {}
    for tokens, have_role in ((with_role, True), (others, False)):
        for token in tokens:
            made = AddedToken(token, special=True) if isinstance(token, str) else token
            made.special = made.special or have_role
            if made.content not in known:
                missing.setdefault(made.content, made)
    if missing:
        backend.add_tokens(list(missing.values()))


def _longest_first(first: int, second: int, most: int) -> tuple[int, int]:
    """Return how many tokens of two texts are kept: the longer one is cut first, then both to halves."""
    if first + second <= most:
        return first, second
    short, long = sorted((first, second))
    long = short if short > most else max(short, most - short)
    if short + long > most:
        short = most // 2
        long = short + most % 2
    return (short, long) if first <= second else (long, short)
