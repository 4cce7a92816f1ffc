"""Texts that a tokenizer can take."""


def check_unicode(name: str, text: str) -> None:
    """Raises:
    ValueError: the text holds a lone surrogate, which no UTF-8 has.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{name}={text!r} is no Unicode text: {error.reason}") from error
