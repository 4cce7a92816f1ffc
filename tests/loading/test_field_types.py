"""A field of a wrong type is named with its file; one that is absent is not checked."""

import pytest

from jpaged.loading.field_types import (
    ABOVE_ZERO,
    FLAG,
    INTEGER,
    POSITIVE,
    REAL,
    TABLE,
    TEXT,
    WHOLE,
    check_fields,
    either,
    list_of,
    table_of,
)

TEXTS = list_of(TEXT, "a list of texts")
NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("type_", "right", "wrong"),
    [
        (INTEGER, (0, -1, 2**70), (True, 1.0, "1", None, [1])),
        (WHOLE, (0, 2**70), (-1, False, 1.0, None)),
        (POSITIVE, (1,), (0, -1, True, 1.0)),
        (REAL, (0, -1.5, 2), (NAN, INF, True, "1", None)),
        (ABOVE_ZERO, (1e-9, 2), (0, -1, NAN, INF, True)),
        (FLAG, (True, False), (0, 1, "true", None)),
        (TEXT, ("", "a"), (1, None, ["a"], b"a")),
        (TABLE, ({}, {"a": 1}), ([], None, "a")),
        (TEXTS, ([], ["a"]), ("a", [1], ["a", None], {"a": "b"}, ("a",))),
        (table_of(TEXT, "a table of texts"), ({}, {"a": "b"}), ([], {"a": 1}, "a")),
        (either(TEXT, TEXTS), ("a", ["a"]), (1, [1], None)),
        (TEXT.or_null(), ("a", None), (1, [])),
    ],
)
def test_a_value_of_another_type_is_named(type_, right, wrong):
    for value in right:
        check_fields("m.json", {"a": value, "other": object()}, {"a": type_, "absent": type_})
    for value in wrong:
        with pytest.raises(ValueError, match=r"^m\.json: a=.* must be ") as raised:
            check_fields("m.json", {"a": value}, {"a": type_})
        assert str(raised.value).endswith(type_.words)
