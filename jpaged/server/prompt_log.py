"""Writes down what was asked and answered, where the operator wants that (``--log-prompts``)."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from typing import Any

from jpaged import RequestOutput
from jpaged.server.caller import Caller

prompts = logging.getLogger("jpaged.prompts")


class PromptLog:
    """Collects one request of the engine, of which a line tells when it ends, however it does.

    Args:
        prompt: what the engine is given.
        deltas: whether its outputs are deltas.
    """

    def __init__(self, caller: Caller, prompt: Mapping[str, Any], *, deltas: bool) -> None:
        self._caller = caller
        self._prompt = prompt
        self._deltas = deltas
        self._texts: dict[int, str] = {}
        self._reasons: dict[int, str | None] = {}

    def add(self, output: RequestOutput) -> None:
        """Take in what came."""
        for one in output.outputs:
            begun = self._texts.get(one.index, "") if self._deltas else ""
            self._texts[one.index] = begun + one.text
            self._reasons[one.index] = one.finish_reason

    def write(self) -> None:
        """Write the line. Of images only their number is told; an output that was cut off has no `finish_reason`."""
        key, images = self._caller.key, (self._prompt.get("multi_modal_data") or {}).get("image", ())
        name = "prompt" if self._prompt.get("prompt") is not None else "prompt_token_ids"
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "request_id": self._caller.request_id,
            "key": None if key is None else key.name,
            name: self._prompt[name],
            **({"images": len(images)} if images else {}),
            "outputs": [
                {"index": index, "text": text, "finish_reason": self._reasons[index]}
                for index, text in sorted(self._texts.items())
            ],
        }
        prompts.info("%s", json.dumps(line))
