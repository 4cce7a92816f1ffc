"""Trains the demo model to add two digits by GRPO: `python scripts/rl/grpo_arithmetic.py --plot reward.png`.

Rolls out with an engine, differentiates the same modules by `jpaged.training` and steps with optax; see docs/rl.md.
With ``--deterministic`` the trainer's log-probabilities are the engine's to the last bit, and the divergence that is
printed is 0. ``--seed 0 1 2`` is three runs, one after another. Prints a table at the end.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from grpo import Report, Settings, Trainer, train
from task import Problem, all_problems, problems, reward

from jpaged import LLM, SamplingParams

STYLES = (("black", "o", "-"), ("0.45", "s", "--"), ("0.65", "^", ":"))
"""Grey, mark of a step and dashes of the mean, run by run."""


@dataclass
class Run:
    """Holds what a run was like.

    Attributes:
        reports: of each step.
        seconds: CPU seconds from the first step's beginning to each one's end.
        before, after: how many of the 81 sums the model gets right, greedily.
    """

    reports: list[Report]
    seconds: list[float]
    before: int
    after: int


def main() -> None:
    args = _arguments()
    if args.plot is not None and find_spec("matplotlib") is None:  # before an hour of training
        raise SystemExit("--plot needs matplotlib: pip install '.[bench]'")
    engine = {"max_model_len": 64, "max_num_seqs": args.prompts * args.samples, "kv_cache_memory_bytes": 128 << 20}
    runs = {}
    for seed in dict.fromkeys(args.seed):
        with LLM(args.model, dtype="float32", seed=seed, deterministic=args.deterministic, **engine) as llm:
            runs[seed] = _run(llm, args, seed)
    rewards = {seed: [report.reward for report in run.reports] for seed, run in runs.items()}
    if args.plot is not None:
        draw(rewards, args.plot)
    print(table(runs))


def _run(llm: LLM, args: argparse.Namespace, seed: int) -> Run:
    asked = problems(seed, args.steps * args.prompts)
    batches = [asked[start : start + args.prompts] for start in range(0, len(asked), args.prompts)]
    run = Run([], [], correct(llm), 0)
    print(f"seed {seed}, right before: {run.before} of 81 sums", flush=True)
    start = time.process_time()

    def tell(number: int, report: Report) -> None:
        run.seconds.append(time.process_time() - start)
        print(
            f"step {number:3d}  reward {report.reward:.3f}  KL to the sampler {report.divergence:.1e}  largest "
            f"|ratio - 1| {report.ratio_off:.1e}  {run.seconds[-1]:6.0f} CPU s",
            flush=True,
        )

    trainer = Trainer(llm, Settings(samples=args.samples, rate=args.rate))
    run.reports = train(trainer, batches, _worth, tell, seed)
    run.after = correct(llm)
    print(f"right after: {run.after} of 81 sums", flush=True)
    return run


def correct(llm: LLM) -> int:
    """Return how many of all sums the model answers rightly when it takes the likeliest token each time."""
    asked = all_problems()
    greedy = SamplingParams(temperature=0, max_tokens=Settings.answer_tokens, stop=["\n"])
    outputs = llm.generate([one.prompt for one in asked], greedy, use_tqdm=False)
    return sum(reward(output.outputs[0].text, one.answer) == 1 for output, one in zip(outputs, asked, strict=True))


def _worth(completion: str, problem: Problem) -> float:
    return reward(completion, problem.answer)


def table(runs: Mapping[int, Run]) -> str:
    """Return a Markdown table of runs by seed: the mean reward of five steps at a time.

    Divergences and ratios are the largest of all runs; CPU seconds are the first one's, which compiles.
    """
    seeds, first_run = list(runs), next(iter(runs.values()))
    titles = ["mean reward" + (f", seed {seed}" if len(runs) > 1 else "") for seed in seeds]
    columns = ["steps", *titles, "divergence", "a ratio's largest distance from 1", "CPU seconds so far"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    steps = len(first_run.reports)
    for first in range(0, steps, 5):
        some = [run.reports[first : first + 5] for run in runs.values()]
        cells = [
            f"{first + 1} to {first + len(some[0])}",
            *(f"{_mean([one.reward for one in each]):.3f}" for each in some),
            f"{max(one.divergence for each in some for one in each):.1e}",
            f"{max(one.ratio_off for each in some for one in each):.1e}",
            f"{first_run.seconds[first + len(some[0]) - 1]:.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m", help="what LLM takes")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--prompts", type=int, default=4, help="prompts a step")
    parser.add_argument("--samples", type=int, default=8, help="completions a prompt")
    parser.add_argument("--rate", type=float, default=Settings.rate, help="learning rate")
    parser.add_argument("--seed", type=int, nargs="+", default=[0], help="of problems and draws; several: a run each")
    parser.add_argument("--deterministic", action="store_true", help="log-probabilities equal to the engine's bits")
    parser.add_argument("--plot", type=Path, help="file to draw the rewards into, .png and .svg (extra bench)")
    return parser.parse_args()


def draw(rewards: Mapping[int, Sequence[float]], path: Path) -> None:
    """Draw each step's mean reward, and the mean over five, of each run by its seed; to be read in grey.

    Runs differ by mark and dashes too. The picture is written as PNG and as SVG, whichever of them `path` names.
    """
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "jpaged"  # the same figures make the same file
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axes = figure.subplots()
    for number, (seed, each) in enumerate(rewards.items()):
        grey, mark, dashes = STYLES[number % len(STYLES)]
        steps = range(1, len(each) + 1)
        smooth = [_mean(each[max(0, i - 4) : i + 1]) for i in range(len(each))]
        axes.plot(steps, each, mark, color=grey, markerfacecolor="none", markersize=4, label=f"seed {seed}, a step")
        axes.plot(steps, smooth, dashes, color=grey, linewidth=2, label=f"seed {seed}, mean of five steps")
    axes.set_xlabel("step")
    axes.set_ylabel("mean reward")
    axes.set_ylim(0, 1)
    axes.grid(axis="y", color="0.85", linewidth=0.6)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    for kind, metadata in (("png", {}), ("svg", {"Date": None})):
        figure.savefig(path.with_suffix(f".{kind}"), dpi=110, metadata=metadata)


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)


if __name__ == "__main__":
    main()
