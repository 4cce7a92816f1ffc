"""Measures what low-rank adapters cost a decode step: CPU time with 0, 1 and 4 adapters in a batch, as a table.

python scripts/bench_lora.py --model smollm2-135m --rank 16 --sequences 16 --rounds 5
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from jpaged import LLM, SamplingParams

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(folder: Path, shapes: dict[str, tuple[int, ...]], rank: int, seed: int) -> str:
    """Write a random adapter of all linear layers in PEFT's form; return its folder."""
    folder.mkdir()
    random, tensors = np.random.default_rng(seed), {}
    for name, (outputs, inputs) in shapes.items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        tensors[f"{module}.lora_A.weight"] = random.normal(size=(rank, inputs), scale=0.02).astype(np.float32)
        tensors[f"{module}.lora_B.weight"] = random.normal(size=(outputs, rank), scale=0.02).astype(np.float32)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(MODULES)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)


def layer_shapes(model: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors that adapters change."""
    from jpaged.loading import load_model

    shapes = load_model(model).tensor_shapes
    return {name: shape for name, shape in shapes.items() if name.split(".")[-2] in MODULES}


def compare_products(rank: int, rounds: int) -> None:
    """Print CPU time of the ways to add low-rank products of 4 adapters to rows of 1536 numbers, 1 and 4 present."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels.low_rank import low_rank_at_once, low_rank_in_turn

    def grouped(x, down, up, slot, present):
        order = jnp.argsort(jnp.where(slot < 0, len(down), slot))
        counts = jnp.bincount(slot, length=len(down))
        inner = jax.lax.ragged_dot(x[order], down.transpose(0, 2, 1), counts)
        out = jax.lax.ragged_dot(inner, up, counts)
        return jnp.zeros_like(out).at[order].set(out)

    ways = {
        "in turn": jax.jit(low_rank_in_turn),
        "at once": jax.jit(lambda x, down, up, slot, present: low_rank_at_once(x, down, up, slot)),
        "ragged_dot": jax.jit(grouped),
    }
    random = np.random.default_rng(0)
    down, up = (random.normal(size=shape).astype(np.float32) for shape in ((4, rank, 1536), (4, rank, 1536)))
    for rows in (16, 512):
        x = random.normal(size=(rows, 1536)).astype(np.float32)
        for different in (1, 4):
            slot = (np.arange(rows) % different).astype(np.int32)
            operands = jax.device_put((x, down, up, slot, np.arange(4) < different))
            spent = dict.fromkeys(ways, float("inf"))
            for _ in range(rounds):
                for name, way in ways.items():
                    jax.block_until_ready(way(*operands))
                    start = time.process_time()
                    for _ in range(20):
                        jax.block_until_ready(way(*operands))
                    spent[name] = min(spent[name], (time.process_time() - start) / 20)
            told = ", ".join(f"{name} {1e6 * seconds:.0f}" for name, seconds in spent.items())
            print(f"{rows} rows, {different} adapters: CPU us a product: {told}")


def placing_seconds(llm: LLM) -> float:
    """Return the CPU seconds of putting an adapter that lies in the pool in the order of products."""
    import jax

    worker = llm.control.engine.runner.worker
    place, blocks = next(iter(worker.adapters._held.items()))
    start = time.process_time()
    worker.adapters._put(worker.pool, place, blocks)
    jax.block_until_ready(worker.adapters._matrices)
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--products", action="store_true", help="compare the products alone")
    args = parser.parse_args()
    if args.products:
        compare_products(args.rank, args.rounds)
        return
    shapes = layer_shapes(args.model)
    with tempfile.TemporaryDirectory() as folder:
        adapters = {f"a{i}": write_adapter(Path(folder) / f"a{i}", shapes, args.rank, i) for i in range(4)}
        llm = LLM(
            args.model,
            enable_lora=True,
            max_loras=4,
            max_lora_rank=args.rank,
            lora_modules=adapters,
            max_num_seqs=args.sequences,
            max_num_batched_tokens=64,
            max_model_len=256,
        )
    params = SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": [7, 11, 13 + i]} for i in range(args.sequences)]
    choices = {0: [None], 1: ["a0"], 4: list(adapters)}
    seconds: dict[int, list[float]] = {count: [] for count in choices}
    for turn in range(args.rounds + 1):  # the first compiles, and loads the adapters
        for count, names in choices.items():
            loras = [names[i % len(names)] for i in range(args.sequences)]
            steps, start = llm.stats().num_steps, time.process_time()
            llm.generate(prompts, params, use_tqdm=False, lora_request=loras)
            spent = (time.process_time() - start) / (llm.stats().num_steps - steps)
            if turn:
                seconds[count].append(spent)
    placing = min(placing_seconds(llm) for _ in range(args.rounds))
    llm.close()
    plain = min(seconds[0])
    print(f"| adapters of {args.sequences} sequences, rank {args.rank} | CPU ms a step | of none |\n|---|---|---|")
    for count, each in seconds.items():
        print(f"| {count or 'none'} | {1e3 * min(each):.1f} | {min(each) / plain:.2f} |")
    print(f"\nPutting one adapter in the order of products: {1e3 * placing:.1f} CPU ms.")


if __name__ == "__main__":
    main()
