"""What all bodies have in common: strict types, no field that is unknown, and null for what is not given."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator

from jpaged.server.errors import ApiError


class Body(BaseModel):
    """A mapping of a request.

    Attributes:
        refused: fields that OpenAI has and this server does not do, with the reason that its caller is told.
    """

    model_config = ConfigDict(extra="forbid", strict=True)
    refused: ClassVar[Mapping[str, str]] = {}

    @model_validator(mode="before")
    @classmethod
    def _given(cls, data: Any) -> Any:
        """Leave out what is null, and refuse what is not done here."""
        if not isinstance(data, dict):
            return data
        given = {name: value for name, value in data.items() if value is not None}
        for name in given.keys() & cls.refused.keys():
            raise ApiError(f"{name} is not supported: {cls.refused[name]}", param=name, code="unsupported_parameter")
        return given


def only_fields(body: Body, fields: Collection[str], where: str, what: str) -> None:
    """Refuse a field that a mapping of this kind has no use for, though others of its class have.

    Args:
        where: place of the mapping in the request.
        what: says of which kind it is.

    Raises:
        ApiError: it has another field.
    """
    for name in sorted(body.model_fields_set - set(fields)):
        told = type(body).model_fields[name].alias or name
        raise ApiError(f"{where}.{told} has no meaning in {what}", param=f"{where}.{told}", code="invalid_value")
