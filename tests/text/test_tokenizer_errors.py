"""Errors of the tokenizers library, which are bare exceptions and panics, name where they come from."""

from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, models

from jpaged.text.tokenizer_errors import NamedErrors, errors_of


def panics():
    models.BPE(vocab={"a": 0, "b": 1}, merges=[("a", "b")])  # "ab" is no token


def raises_a_bare_exception():
    Tokenizer(models.WordLevel({"a": 0}, unk_token="?")).encode("b")


@pytest.mark.parametrize("use", [panics, raises_a_bare_exception])
def test_a_panic_and_a_bare_exception_become_value_errors_that_name_the_place(use):
    with pytest.raises(ValueError, match=r"^m\.gguf: merges: \w+") as raised, NamedErrors("m.gguf: merges"):
        use()
    assert raised.value.__cause__ is not None


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1), TypeError("x"), ValueError("x")])
def test_other_errors_pass(error):
    with pytest.raises(type(error)) as raised, NamedErrors("m"):
        raise error
    assert raised.value is error


def test_further_classes_may_be_named():
    with pytest.raises(ValueError, match=r"^m: x$"), NamedErrors("m", OverflowError):
        raise OverflowError("x")


def test_a_tokenizer_is_named_by_where_it_is_from():
    for tokenizer, name in (
        (SimpleNamespace(name_or_path="org/m"), "the tokenizer of org/m: x"),
        (object(), "the tokenizer: x"),
    ):
        with pytest.raises(ValueError, match=f"^{name}$"), errors_of(tokenizer):
            raise Exception("x")
