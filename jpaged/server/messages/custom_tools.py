"""Reads the input of a custom tool out of the arguments of the function that stands for it, however it is cut up."""

from __future__ import annotations

import json
import re

_BEGINNING = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_CHARACTERS = re.compile(
    r'(?:[^"\\]|\\(?:u[dD][89abAB][0-9a-fA-F]{2}'
    r"(?:\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?=[^\\]|\\[^u]|\\u[^dD]|\\u[dD][^c-fC-F]))"
    r"|u(?![dD][89abAB])[0-9a-fA-F]{4}|[^u]))*"
)
"""Whole characters of a JSON string; the two escapes of a pair of surrogates are one."""
_LONE = re.compile("[\ud800-\udfff]")
"""Half of a pair whose other half did not come."""


class CustomInput:
    """The input of one call, from its arguments ``{"input": "..."}``."""

    def __init__(self) -> None:
        self._held = ""
        self._begun = self._ended = False

    def push(self, arguments: str) -> str:
        """Read more of the arguments; return the characters of the input that they complete."""
        if self._ended:
            return ""
        self._held += arguments
        if not self._begun:
            found = _BEGINNING.match(self._held)
            if found is None:
                return ""
            self._begun, self._held = True, self._held[found.end() :]
        found = _CHARACTERS.match(self._held)
        assert found is not None, "the pattern matches no character too"
        whole, self._held = found[0], self._held[found.end() :]
        self._ended = self._held.startswith('"')
        return _LONE.sub("\ufffd", json.loads(f'"{whole}"', strict=False))
