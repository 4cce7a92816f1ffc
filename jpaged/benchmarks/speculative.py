"""Measures speculative decoding: what is kept of the drafts, tokens a step, and the speed against none."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from jpaged.llm import LLM
from jpaged.outputs import RequestOutput
from jpaged.sampling_params import SamplingParams


@dataclass(frozen=True)
class Speculated:
    """Holds the figures of one kind of prompt at one batch size.

    Attributes:
        kind: what the prompts ask for.
        batch: number of sequences that run at once.
        way: how drafts are made.
        drafted, accepted: drafts that were verified, and those that were kept.
        tokens, steps: output tokens, and steps that were run for them, prompts included.
        plain_steps: steps without drafts.
        plain_seconds, seconds: median times of a round without and with drafts.
        ratio: median over the rounds of the speed with drafts, as a multiple of that without in the same round.
        cpu_ratio: the same of CPU time, which tells more where other processes run.
        equal, outputs: outputs whose tokens are those without drafts, of all.
    """

    kind: str
    batch: int
    way: str
    drafted: int
    accepted: int
    tokens: int
    steps: int
    plain_steps: int
    plain_seconds: float
    seconds: float
    ratio: float
    cpu_ratio: float
    equal: int
    outputs: int

    def __str__(self) -> str:
        kept = f"{self.accepted / self.drafted:4.0%}" if self.drafted else "  - "
        return (
            f"{self.kind:12} {self.batch:5} {self.way:10} {kept:>8} {self.tokens / self.steps / self.batch:10.2f} "
            f"{self.tokens / self.plain_seconds:10.1f} {self.tokens / self.seconds:10.1f} {self.ratio:7.2f} "
            f"{self.cpu_ratio:6.2f} "
            f"{self.equal:5} of {self.outputs}"
        )


HEADER = (
    f"{'prompts':12} {'batch':>5} {'drafts':10} {'kept':>8} {'a step':>10} {'plain t/s':>10} {'tokens/s':>10} "
    f"{'ratio':>7} {'CPU':>6} {'equal':>5}"
)


def run(
    plain: LLM,
    drafting: Mapping[str, LLM],
    prompts: Mapping[str, Sequence[str]],
    *,
    batches: Sequence[int] = (1, 8),
    params: SamplingParams,
    rounds: int = 3,
    alone: int | None = None,
    say: Callable[[str], None] = print,
) -> list[Speculated]:
    """Run every kind of prompt at every batch size with each engine, in turns, so that what else the machine does
    meets all of them.

    Args:
        drafting: engines with drafts, by the name of the way they are made.
        params: what every request asks for; its seed counts.
        alone: number of prompts of each kind that run at a batch size of 1, which takes longest; None = all.
    """
    found = []
    say(HEADER)
    engines = {"": plain, **drafting}
    for kind, every in prompts.items():
        for batch in batches:
            texts = every[:alone] if batch == 1 else every
            for engine in engines.values():
                _generate(engine, texts[:batch], batch, params)  # compiles what is not yet, and fills the prefix cache
            before = {way: engine.stats() for way, engine in engines.items()}
            seconds: dict[str, list[float]] = {way: [] for way in engines}
            cpu: dict[str, list[float]] = {way: [] for way in engines}
            outputs: dict[str, list[RequestOutput]] = {}
            for number in range(rounds):
                order = list(engines) if number % 2 == 0 else list(reversed(engines))
                for way in order:
                    start, cpu_start = time.perf_counter(), time.process_time()
                    outputs[way] = _generate(engines[way], texts, batch, params)
                    seconds[way].append(time.perf_counter() - start)
                    cpu[way].append(time.process_time() - cpu_start)
            after = {way: engine.stats() for way, engine in engines.items()}
            ids = {way: [o.outputs[0].token_ids for o in outs] for way, outs in outputs.items()}
            for way in drafting:
                found.append(
                    Speculated(
                        kind=kind,
                        batch=batch,
                        way=way,
                        drafted=after[way].num_draft_tokens - before[way].num_draft_tokens,
                        accepted=after[way].num_accepted_tokens - before[way].num_accepted_tokens,
                        tokens=sum(map(len, ids[way])),
                        steps=(after[way].num_steps - before[way].num_steps) // rounds,
                        plain_steps=(after[""].num_steps - before[""].num_steps) // rounds,
                        plain_seconds=median(seconds[""]),
                        seconds=median(seconds[way]),
                        ratio=_speed(seconds[""], seconds[way]),
                        cpu_ratio=_speed(cpu[""], cpu[way]),
                        equal=sum(a == b for a, b in zip(ids[way], ids[""], strict=True)),
                        outputs=len(texts),
                    )
                )
                say(str(found[-1]))
    return found


def _speed(plain: Sequence[float], drafting: Sequence[float]) -> float:
    return median(a / b for a, b in zip(plain, drafting, strict=True))


def _generate(llm: LLM, texts: Sequence[str], batch: int, params: SamplingParams) -> list[RequestOutput]:
    """Run the prompts, `batch` at a time, each group to its end."""
    outputs: list[RequestOutput] = []
    for start in range(0, len(texts), batch):
        outputs += llm.generate(list(texts[start : start + batch]), params, use_tqdm=False)
    return outputs
