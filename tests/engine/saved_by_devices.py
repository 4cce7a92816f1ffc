"""Saves a state on some devices and goes on from it on others: ``saved_by_devices.py MODEL TP,DP-TP,DP``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from test_saved_families import answers, begin

from jpaged import LLM


def settings(sizes: str) -> dict[str, int]:
    tensor, data = sizes.split(",")
    return {"tensor_parallel_size": int(tensor), "data_parallel_size": int(data)}


if __name__ == "__main__":
    model, sizes = sys.argv[1:]
    before, after = map(settings, sizes.split("-"))
    state = Path(model) / "state"
    llm = begin(model, 7, **before)
    llm.save_state(state)
    llm.close()
    other = LLM.restore_state(state, **after)
    kept = sum(replica.memory.num_used_blocks for replica in other.control.engine.replicas)
    outputs = other.resume(use_tqdm=False)
    for replica in other.control.engine.replicas:
        assert replica.memory.num_used_blocks == 0
        replica.memory.check_invariants()
    print(json.dumps({"answers": answers(outputs), "kept": kept}))
