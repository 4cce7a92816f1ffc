"""Keeps the grammars of answers, since agents send the same tools with each turn."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from hashlib import blake2b
from typing import Any

from jpaged.kept_newest import KeptNewest

MOST_KEPT = 64
"""Grammars that are kept."""
MOST_KEPT_CHARACTERS = 4 << 20
"""Most characters of all kept grammars; one may have a million."""


class KeptGrammars:
    """Keeps the newest grammars, up to `MOST_KEPT` and `MOST_KEPT_CHARACTERS`. Any thread may call it.

    The keys are digests: the tools of an agent may have as many characters as their grammar.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards `_kept`; grammars are made without it
        self._kept = KeptNewest[str](MOST_KEPT, MOST_KEPT_CHARACTERS)

    def of(self, asked: Any, make: Callable[[], str]) -> str:
        """Return a kept grammar, or make it.

        Args:
            asked: all that decides the grammar, as JSON. The order of names counts, as arguments are written in it.
            make: makes the grammar. What it raises is not kept.
        """
        try:
            key = blake2b(json.dumps(asked).encode(), digest_size=32).digest()
        except (TypeError, ValueError, RecursionError):  # a schema that `make` refuses with its reason
            return make()
        with self._lock:
            kept = self._kept.get(key)
        if kept is not None:
            return kept
        grammar = make()
        with self._lock:
            self._kept.put(key, grammar, len(grammar))
        return grammar
