"""What all bodies have in common: strict types, no field that is unknown, and null for what is not given."""

from __future__ import annotations

from collections.abc import Mapping
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
