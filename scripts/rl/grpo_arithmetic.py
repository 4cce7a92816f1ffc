"""Trains the demo model to add two digits by GRPO: `python scripts/rl/grpo_arithmetic.py --plot reward.png`.

Rolls out with an engine, differentiates the same modules by `jpaged.training` and steps with optax; see docs/rl.md.
With ``--deterministic`` the trainer's log-probabilities are the engine's to the last bit, and the divergence that is
printed is 0. ``--docs docs`` writes the figures and the plot of that page.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from grpo import Report, Settings, Trainer, train
from task import Problem, all_problems, problems, reward

from jpaged import LLM, SamplingParams

BEGIN, END = "<!-- figures of scripts/rl/grpo_arithmetic.py -->", "<!-- end of figures -->"
"""What stands around the figures in docs/rl.md."""
PICTURE = "grpo_reward.png"


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
    engine = {"max_model_len": 64, "max_num_seqs": args.prompts * args.samples, "kv_cache_memory_bytes": 128 << 20}
    with LLM(args.model, dtype="float32", seed=args.seed, deterministic=args.deterministic, **engine) as llm:
        run = _run(llm, args)
    rewards = [report.reward for report in run.reports]
    if args.plot is not None:
        _draw(rewards, args.plot)
    if args.docs is not None:
        _draw(rewards, args.docs / PICTURE)
        page = args.docs / "rl.md"
        page.write_text(with_figures(page.read_text(), figures(run, args)))


def _run(llm: LLM, args: argparse.Namespace) -> Run:
    asked = problems(args.seed, args.steps * args.prompts)
    batches = [asked[start : start + args.prompts] for start in range(0, len(asked), args.prompts)]
    run = Run([], [], correct(llm), 0)
    print(f"right before: {run.before} of 81 sums", flush=True)
    start = time.process_time()

    def tell(number: int, report: Report) -> None:
        run.seconds.append(time.process_time() - start)
        print(
            f"step {number:3d}  reward {report.reward:.3f}  KL to the sampler {report.divergence:.1e}  largest "
            f"|ratio - 1| {report.ratio_off:.1e}  {run.seconds[-1]:6.0f} CPU s",
            flush=True,
        )

    trainer = Trainer(llm, Settings(samples=args.samples, rate=args.rate))
    run.reports = train(trainer, batches, _worth, tell)
    run.after = correct(llm)
    print(f"right after: {run.after} of 81 sums")
    return run


def correct(llm: LLM) -> int:
    """Return how many of all sums the model answers rightly when it takes the likeliest token each time."""
    asked = all_problems()
    greedy = SamplingParams(temperature=0, max_tokens=Settings.answer_tokens, stop=["\n"])
    outputs = llm.generate([one.prompt for one in asked], greedy, use_tqdm=False)
    return sum(reward(output.outputs[0].text, one.answer) == 1 for output, one in zip(outputs, asked, strict=True))


def _worth(completion: str, problem: Problem) -> float:
    return reward(completion, problem.answer)


def figures(run: Run, args: argparse.Namespace) -> str:
    """Return a run's figures for the documentation: the mean reward of five steps at a time."""
    lines = [
        "| steps | mean reward | divergence | largest \\|ratio - 1\\| | CPU seconds so far |",
        "|---|---|---|---|---|",
    ]
    for first in range(0, len(run.reports), 5):
        some = run.reports[first : first + 5]
        lines.append(
            f"| {first + 1} to {first + len(some)} | {_mean([one.reward for one in some]):.3f} "
            f"| {max(one.divergence for one in some):.1e} | {max(one.ratio_off for one in some):.1e} "
            f"| {run.seconds[first + len(some) - 1]:.0f} |"
        )
    exact = " --deterministic" if args.deterministic else ""
    said = f"Of the 81 sums the model gets {run.before} right before, and {run.after} after."
    command = f"`python scripts/rl/grpo_arithmetic.py{exact} --steps {len(run.reports)} --seed {args.seed} --docs docs`"
    return "\n".join(
        [*lines, "", said, "", f"![The mean reward by step]({PICTURE})", "", f"({command}; {args.machine}.)"]
    )


def with_figures(page: str, text: str) -> str:
    """Return the page with other figures.

    Raises:
        ValueError: it has no place for them.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the page has no place for figures: {BEGIN} ... {END}")
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m", help="what LLM takes")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--prompts", type=int, default=4, help="prompts a step")
    parser.add_argument("--samples", type=int, default=8, help="completions a prompt")
    parser.add_argument("--rate", type=float, default=Settings.rate, help="learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--deterministic", action="store_true", help="log-probabilities equal to the engine's bits")
    parser.add_argument("--plot", type=Path, help="file to draw the rewards into (extra bench)")
    parser.add_argument("--docs", type=Path, help="folder whose rl.md gets the figures and the plot (extra bench)")
    parser.add_argument("--machine", default="the machine above", help="what it ran on, for --docs")
    return parser.parse_args()


def _draw(rewards: Sequence[float], path: Path) -> None:
    """Draw each step's mean reward, and the mean over five."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(rewards, color="tab:blue", alpha=0.35, label="mean of a step")
    axes.plot([_mean(rewards[max(0, i - 4) : i + 1]) for i in range(len(rewards))], label="mean of five steps")
    axes.set_xlabel("step")
    axes.set_ylabel("reward")
    axes.set_ylim(0, 1)
    axes.legend()
    figure.savefig(path)


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)


if __name__ == "__main__":
    main()
