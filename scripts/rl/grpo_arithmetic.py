"""Trains the demo model to add two digits by GRPO: `python scripts/rl/grpo_arithmetic.py --plot reward.png`.

Rolls out with an engine, differentiates the same modules by `jpaged.training` and steps with optax; see docs/rl.md.
With ``--deterministic`` the trainer's log-probabilities are the engine's to the last bit, and the divergence that is
printed is 0.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from grpo import Report, Settings, Trainer, train
from task import Problem, problems, reward

from jpaged import LLM


def main() -> None:
    args = _arguments()
    settings = Settings(samples=args.samples, rate=args.rate)
    asked = problems(args.seed, args.steps * args.prompts)
    batches = [asked[start : start + args.prompts] for start in range(0, len(asked), args.prompts)]
    engine = {"max_model_len": 64, "max_num_seqs": args.prompts * args.samples, "kv_cache_memory_bytes": 128 << 20}
    with LLM(args.model, dtype="float32", seed=args.seed, deterministic=args.deterministic, **engine) as llm:
        start = time.process_time()

        def tell(number: int, report: Report) -> None:
            print(
                f"step {number:3d}  reward {report.reward:.3f}  KL to the sampler {report.divergence:.1e}  largest "
                f"|ratio - 1| {report.ratio_off:.1e}  {time.process_time() - start:6.0f} CPU s",
                flush=True,
            )

        reports = train(Trainer(llm, settings), batches, _worth, tell)
    if args.plot is not None:
        _draw([report.reward for report in reports], args.plot)


def _worth(completion: str, problem: Problem) -> float:
    return reward(completion, problem.answer)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m", help="what LLM takes")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--prompts", type=int, default=4, help="prompts a step")
    parser.add_argument("--samples", type=int, default=8, help="completions a prompt")
    parser.add_argument("--rate", type=float, default=Settings.rate, help="learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--deterministic", action="store_true", help="log-probabilities equal to the engine's bits")
    parser.add_argument("--plot", type=Path, help="file to draw the rewards into (extra bench)")
    return parser.parse_args()


def _draw(rewards: list[float], path: Path) -> None:
    """Draw each step's mean reward, and the mean over five."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    means = [sum(rewards[max(0, i - 4) : i + 1]) / min(5, i + 1) for i in range(len(rewards))]
    axes.plot(rewards, color="tab:blue", alpha=0.35, label="mean of a step")
    axes.plot(means, color="tab:blue", label="mean of five steps")
    axes.set_xlabel("step")
    axes.set_ylabel("reward")
    axes.set_ylim(0, 1)
    axes.legend()
    figure.savefig(path)


if __name__ == "__main__":
    main()
