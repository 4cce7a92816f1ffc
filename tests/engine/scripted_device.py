"""Engines whose device computes nothing: each call is noted, and tokens are drawn from a hash.

So what the host makes of a load, down to each array it hands to the device, can be compared exactly on every machine.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from jpaged import LLM
from jpaged.execution.readouts.prompt_scores import ScoreOutput
from jpaged.execution.sampling.sample_step import Drawn, StepOutput
from jpaged.execution.sampling.truncations import DrawnRows
from jpaged.execution.wire import encode
from jpaged.scheduling.work import ENCODES, LOADS


class ScriptedDevice:
    """Takes the place of an engine's worker in all that steps ask of it.

    A token depends on its row's seed and position alone, so that it does not depend on the batch.

    Args:
        period: after how many tokens a sequence repeats itself, as drafts need; None = it does not.

    Attributes:
        calls: how often each device call was made.
    """

    def __init__(self, llm: LLM, period: int | None = None) -> None:
        self._period = period
        self._worker = llm.control.engine.runner.worker
        self._vocab = llm.control.engine.runner.settings.vocab_size
        self._digest = hashlib.sha256()
        self.calls: Counter[str] = Counter()
        self._worker.fetch = lambda values: values
        nothing = ("work", "give_back", "compute")
        for name in nothing:
            setattr(self._worker, name, self._noted(name, lambda *args: None))
        for call in (self.draw, self.draft, self.score, self.pool_hidden):
            setattr(self._worker, call.__name__, self._noted(call.__name__, call))

    @property
    def digest(self) -> str:
        """Return a checksum of all calls and their arguments, in order."""
        return self._digest.hexdigest()

    def _noted(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any) -> Any:
            self.calls[f"work {args[0]}" if name == "work" else name] += 1
            # Pixels and adapters are floats, whose last bits may differ from machine to machine.
            plain = tuple(_shapes(arg) if name == "work" and args[0] in (ENCODES, LOADS) else arg for arg in args)
            self._digest.update(encode(name, plain))
            return call(*args)

        return noted

    def draw(self, args: Any, top: int) -> StepOutput:
        position = args.position.astype(np.uint64) % np.uint64(self._period or 1 << 32)
        seeds = next((each.seed[..., 1] for each in args.edits if isinstance(each, DrawnRows)), np.zeros_like(position))
        mixed = seeds.astype(np.uint64) * np.uint64(40503) + position
        first = (mixed * np.uint64(2654435761) >> np.uint64(7)) % np.uint64(self._vocab)
        most = min(top, self._vocab)
        ranked = (first[..., None] + np.arange(most, dtype=np.uint64)) % np.uint64(self._vocab)
        logprobs = np.broadcast_to(-0.25 * np.arange(1, most + 1, dtype=np.float32), ranked.shape)
        tokens = first.astype(np.int32)
        drawn = np.full(tokens.shape, -0.25, np.float32)
        draws = Drawn(tokens, drawn, np.ones_like(tokens), ranked.astype(np.int32), logprobs)
        return StepOutput.of(draws, xp=np)

    def draft(self, batch: Any, bucket: Any, args: Any, top: int) -> np.ndarray:
        return self.draw(args, top).tokens

    def score(self, rows: np.ndarray, targets: np.ndarray, top: int) -> ScoreOutput:
        shape = (*np.shape(targets), top)
        return ScoreOutput(
            np.zeros(np.shape(targets), np.float32),
            np.ones(np.shape(targets), np.int32),
            np.zeros(shape, np.int32),
            np.zeros(shape, np.float32),
        )

    def pool_hidden(self, owners: np.ndarray, size: int, largest: bool) -> np.ndarray:
        return np.zeros((*np.shape(owners)[:-1], size, 8), np.float32)


def _shapes(arg: Any) -> Any:
    if isinstance(arg, np.ndarray) and arg.dtype.kind in "fu":
        return list(arg.shape)
    return [_shapes(item) for item in arg] if isinstance(arg, list | tuple) else arg
