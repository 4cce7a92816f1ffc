"""Lets an engine compile few shapes, where the time of a test goes into compiling."""

from __future__ import annotations

from jpaged import LLM
from jpaged.execution.shapes import SAMPLERS


def run_in_few_shapes(llm: LLM) -> None:
    """Compile the largest decode step, the largest mixed step and a sampler for greedy rows; steps of fewer tokens or
    sequences run in these, as they do while a server compiles the rest in the background. Whatever they do not hold
    is compiled when a step first has it."""
    runner = llm.control.engine.runner
    shapes, buckets = runner.shapes, runner.buckets
    for bucket in (buckets.mixed[-1], buckets.decode[-1]):
        shapes.step(bucket).trace()()
    shapes.sampler(buckets.sample_rows[-1], SAMPLERS[0]).trace()()
    runner.takes_larger = True
