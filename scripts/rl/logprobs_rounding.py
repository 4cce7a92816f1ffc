"""Measures how rounding in float32 changes log-probabilities.

    python scripts/rl/logprobs_rounding.py qwen3_next jamba smollm2

Uses the tests' tiny random checkpoints and needs PyTorch. The first table compares engine, trainer and transformers,
all in float32, with each other and with float64, and shows the effect of moving every weight to the next float32
number. The second follows such a change of the embeddings from layer to layer.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "models"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "training"))

from checkpoints import CHECKPOINTS, make_checkpoint
from float64_logprobs import Float64Logprobs
from rollouts import SETTINGS, Rollout, rolled_out

from jpaged import LLM
from jpaged.training import logprobs


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkpoints", nargs="+", choices=CHECKPOINTS, metavar="CHECKPOINT", help="of tests/models")
    names = parser.parse_args().checkpoints
    head = ("96 drawn tokens", "engine, trainer", *(f"{who}, float64" for who in ("engine", "trainer", "transformers")))
    print("| " + " | ".join(head) + " | next weights |\n|" + "---|" * (1 + len(head)))
    rows = {name: _compared(name) for name in names}
    print("\n| layers | " + " | ".join(rows) + " |\n|" + "---|" * (1 + len(rows)))
    for depth in range(max(len(growth) for growth in rows.values())):
        cells = (_cell(growth[depth]) if depth < len(growth) else "" for growth in rows.values())
        print(f"| {depth} | " + " | ".join(cells) + " |")


def _compared(name: str) -> np.ndarray:
    """Print a checkpoint's row, and return what `Float64Logprobs.growth` says of it."""
    with TemporaryDirectory() as folder:
        peer = make_checkpoint(name, Path(folder))
        with LLM(folder, deterministic=True, **SETTINGS) as llm:
            drawn = rolled_out(llm)
            trainer = np.asarray(logprobs(llm, llm.params, drawn.tokens, drawn.mask))
        judge = Float64Logprobs(folder, drawn.tokens, drawn.mask)
        exact, engine = judge.exact(), drawn.engine[:, 1:]
        pairs = (engine, trainer), (engine, exact), (trainer, exact), (_of_torch(peer, drawn), exact)
        differences = [*(one - other for one, other in pairs), judge.of_neighbours()]
        cells = (f"{np.abs(of)[..., drawn.is_drawn[:, 1:]].max():.1e}" for of in differences)
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)
        return judge.growth()


def _of_torch(model: Any, drawn: Rollout) -> np.ndarray:
    """Return transformers' float32 log-probabilities; 0 for padding."""
    found = np.zeros((len(drawn.tokens), drawn.tokens.shape[1] - 1), np.float32)
    for row, mask in enumerate(drawn.mask):
        tokens = torch.tensor(drawn.tokens[row, mask], dtype=torch.long)
        with torch.no_grad():
            scores = model(tokens[None]).logits[0].log_softmax(-1)
        found[row, : len(tokens) - 1] = scores[:-1].gather(1, tokens[1:, None])[:, 0].numpy()
    return found


def _cell(change: np.ndarray) -> str:
    """Return the median and the greatest change of any token."""
    return f"{np.median(change):.1e}, {change.max():.1e}"


if __name__ == "__main__":
    main()
