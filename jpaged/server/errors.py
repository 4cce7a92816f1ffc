"""Errors of requests, in no protocol's form: `protocols.error_response` gives them that of the request's path."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi.exceptions import RequestValidationError

from jpaged import EngineBusy, EngineStopped, short_values
from jpaged.short_values import short_message, shown, with_short_values

_ALTERNATIVE = re.compile(r"str|int|[a-z-]+\[.*|[A-Z]\w*")
"""Matches the names that pydantic gives to the alternatives of a union in an error's place."""
_TELLING = ("missing", "value_error")
"""Types of the errors whose value is the object around a field, or which say themselves what is wrong with it."""
_SOME_OF = reprlib.Repr()
"""Writes a few items of a list or an object."""
_FIELD_ERRORS = ("unknown_field", "refused_field")
"""Types of the errors about a field of an object, whose place is the object's."""
_SUBJECT = re.compile(
    r"(?:prompt \d+: )?(?:(\w+)(?:=|\[|:| has\b| have\b)|the (prompt) has\b"
    r"|\d+ (images|videos) (?:were given|follow)\b)"
)
"""Matches the parameter that a message is about."""
_ITEM = re.compile(r"(image|video) (\d+) of (\d+)\b|messages have \d+ (image|video)s?:")
"""Matches the image or video that a message is about: one of a prompt's, or all where the model takes none."""
_PARAMETER = re.compile(r"'[^']*'|\"[^\"]*\"|(?<!\w)(\w+)(?==)")
"""Matches a parameter with its value, and quoted texts, in which there is none."""
_TOO_LONG = re.compile(
    r"(?:prompt \d+: )?(?:data_[12](?:\[\d+\])?: )?the prompt has \d+ (?:tokens|characters), "
    r".*(?:\bmax_model_len=|\blimit of \d+ for a pair)",
    re.DOTALL,
)
CLIENT_GONE = 499
"""Status in the log of a request whose client disconnected. It is never sent."""


class ApiError(Exception):
    """An error that is sent to the caller.

    Args:
        message: the value and the limit.
        status: HTTP status.
        param: name of the wrong field; None if it is not about a field.
        code: identifier for programs.
        headers: further headers.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = _unicode(short_message(with_short_values(message)))
        self.status = status
        self.param = None if param is None else _unicode(param)
        self.code = code
        self.headers = dict(headers or {})


def shortened(text: str) -> str:
    """Return the beginning of a text that a message quotes, with lone surrogates escaped."""
    return _unicode(short_values.shortened(text))


def _unicode(text: str) -> str:
    """Return a text with lone surrogates escaped: a body's JSON may contain them, and an answer may not."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


class ClientGone(Exception):
    """The client closed its connection, so that no answer is sent."""


def refused(
    error: Exception,
    fields: Collection[str] = (),
    sent_as: Mapping[str, str] | None = None,
    images: Sequence[str] = (),
    videos: Sequence[str] = (),
) -> ApiError:
    """Return the error for a value that jpaged refuses; it names the field that the message begins with.

    Args:
        fields: names of the body's fields.
        sent_as: the client's names, or paths, of parameters that have others in the message.
        images, videos: paths of the request's images and videos, of which the prompt may have the last ones only.
    """
    message, sent_as = with_short_values(str(error)), sent_as or {}
    code = "context_length_exceeded" if _TOO_LONG.match(message) else "invalid_value"
    subject, param = _SUBJECT.match(message), None
    item = _ITEM.match(message)
    if item and (path := _media_path(item, {"image": images, "video": videos}[item[1] or item[4]])):
        param = path
        message = f"{param}: {message}"
    elif subject is not None:
        name = subject[1] or subject[2] or subject[3]
        known = name in fields or name in sent_as.values()
        param = sent_as.get(name, name if known else None)
        if param not in (None, name):
            start, end = subject.span(1)
            message = f"{param}: {message}" if start < 0 else f"{message[:start]}{param}{message[end:]}"
    message = _PARAMETER.sub(lambda found: sent_as.get(found[1], found[0]), message)
    return ApiError(message, param=param, code=code)


def _media_path(item: re.Match[str], paths: Sequence[str]) -> str | None:
    """Return the path of the image or video that a message is about.

    None: it has none, or it is one of several parts with features of images, which are numbered within their part.
    """
    if item[1] and any(path.endswith(".image_embeds") for path in paths):
        return paths[0] if len(paths) == 1 else None
    at = len(paths) + int(item[2]) - int(item[3]) - 1 if item[1] else 0
    return paths[at] if 0 <= at < len(paths) else None


@dataclass(frozen=True)
class ClientNames:
    """The client's names of what its request has, by which errors speak.

    Attributes:
        fields, sent_as, images, videos: see `refused`.
    """

    fields: Collection[str] = ()
    sent_as: Mapping[str, str] = field(default_factory=dict)
    images: Sequence[str] = ()
    videos: Sequence[str] = ()

    def refusal(self, error: Exception) -> ApiError:
        """Return the error for a value that jpaged refuses."""
        return refused(error, self.fields, self.sent_as, self.images, self.videos)

    def about(self, name: str, message: str) -> ApiError:
        """Return the error of a message about one field of a turn."""
        return ApiError(message, param=self.sent_as.get(name, name), code="invalid_value")


def engine_error(error: Exception) -> ApiError | None:
    """Return the error for an exception of the engine; None for any other exception."""
    if isinstance(error, EngineBusy):
        return ApiError(str(error), status=429, code="engine_busy", headers={"Retry-After": "1"})
    if isinstance(error, EngineStopped):
        return ApiError("the engine has stopped", status=503, code="engine_stopped")
    if isinstance(error, TimeoutError):
        return ApiError("the request took longer than the server allows", status=504, code="request_timeout")
    return None


def described(error: Exception) -> ApiError:
    """Return the error for any exception; an unexpected one becomes a bare 500."""
    if isinstance(error, ApiError):
        return error
    return engine_error(error) or ApiError("the server failed on this request", status=500, code="internal_error")


def of_body(error: RequestValidationError) -> ApiError:
    """Return the error of an invalid body."""
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return ApiError(f"the body is not JSON: {first['ctx']['error']}", code="invalid_json")
    if len(first["loc"]) < 2 and first["type"] not in _FIELD_ERRORS:
        return ApiError("the body must be a JSON object, with the header Content-Type: application/json")
    return invalid([{**each, "loc": each["loc"][1:]} for each in error.errors()])


def invalid(errors: Sequence[Any]) -> ApiError:
    """Return the first of the errors that pydantic found, with the path of its field.

    Of the errors of a union's alternatives it is the one that lies deepest, for it knows the value best.
    """
    start = _path(errors[0])
    alternatives = [error for error in errors if _path(error)[: len(start)] == start]
    error = max(alternatives, key=lambda error: len(_path(error)))
    path, context = _path(error), error.get("ctx", {})
    if error["type"] in _FIELD_ERRORS:
        path = [*path, context["field"]]
    param = ".".join(path)
    if error["type"] == "unknown_field":
        nearest = f"; did you mean {context['reason']}?" if context["reason"] else ""
        message = f"Unrecognized request argument supplied: {param}{nearest}"
        return ApiError(message, param=param, code="unknown_parameter")
    if error["type"] == "refused_field":
        return ApiError(f"{param} is not supported: {context['reason']}", param=param, code="unsupported_parameter")
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] in _TELLING:
        return ApiError(f"{param}: {message}", param=param, code="invalid_value")
    return ApiError(f"{param}={_begun(error['input'])}: {message}", param=param, code="invalid_value")


def _begun(value: Any) -> str:
    """Return a value as an error quotes it, without looking at all of it."""
    return shown(value[: short_values.MOST_QUOTED]) if isinstance(value, str) else _SOME_OF.repr(value)


def _path(error: Mapping[str, Any]) -> list[str]:
    """Return the place of an error without the names that pydantic gives to the alternatives of a union."""
    parts = [str(part) for part in error["loc"]]
    return [shortened(part) for part in parts if not _ALTERNATIVE.fullmatch(part)]
