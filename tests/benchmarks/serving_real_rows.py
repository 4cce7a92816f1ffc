"""Makes rows of runs as `jpaged bench serving` has them, for tests of what is said of them."""

from __future__ import annotations

import math
from typing import Any


def made(rate: float, seed: int, value: float, share: float = 1.0, **more: Any) -> dict[str, Any]:
    """Return a run whose latencies are all `value` seconds, infinite where requests were cut off."""
    spread = {"mean": value, "p50": value, "p90": value, "p99": 2 * value}
    row = {"rate": rate, "seed": seed, "share": share, "normalised": spread | {"all": math.isfinite(value)}}
    row |= dict.fromkeys(("ttft", "inter_token", "latency"), spread)
    row |= {"by_kind": {"chat": value}, "goodput": rate, "preemptions": 1, "cached": 5, "prompt_tokens": 10}
    row |= {"planned": round(10 * rate) if math.isfinite(rate) else 24}
    row |= {"completed": row["planned"], "output_tokens": 10 * row["planned"]}
    return row | more
