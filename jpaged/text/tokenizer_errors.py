"""Names the place of errors of the `tokenizers` library, without importing it."""

from __future__ import annotations

from typing import Any


class NamedErrors:
    """Makes a ValueError that names a place of each error that the `tokenizers` library raises within the context.

    The library raises bare exceptions, and panics of Rust, which are no `Exception`. Any thread may enter it.

    Args:
        place: what the error comes from: a file, and its key where one is known.
        also: further classes of errors that are named: the library's of arguments that it does not take.
    """

    def __init__(self, place: object, *also: type[Exception]) -> None:
        self._place, self._also = place, also

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is not None and (
            kind is Exception or type(error).__name__ == "PanicException" or isinstance(error, self._also)
        ):
            raise ValueError(f"{self._place}: {error}") from error


def errors_of(tokenizer: Any) -> NamedErrors:
    """Return the context in which transformers' tokenizer is used, whose errors are the library's."""
    name = getattr(tokenizer, "name_or_path", "")
    return NamedErrors(f"the tokenizer of {name}" if name else "the tokenizer")
