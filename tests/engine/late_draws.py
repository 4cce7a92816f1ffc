"""A load with grammars whose draws wait for the host, interrupted wherever that is between a pass and its draw."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from jpaged import LLM, SamplingParams, StructuredOutputsParams

POINTS = ("forward", "read", "fetch", "accept")
"""The pass, the draw, the wait for the tokens of the step before, and a grammar that takes one of these."""


class Fault(Exception):
    """Stands for a failure of the host or of the device."""


def requests(llm: LLM) -> list[Any]:
    """Queue sequences with forced runs, drawn and greedy ones, forks, and one without a grammar."""
    run = StructuredOutputsParams(regex="(ab|cd)(efghij|klmnop){2}[a-z]{4}")
    free = StructuredOutputsParams(regex="[a-f]{3,12}")
    params = [
        SamplingParams(temperature=1.0, seed=1, max_tokens=16, n=2, structured_outputs=run),
        SamplingParams(temperature=0.0, max_tokens=12, structured_outputs=free),
        SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
        SamplingParams(temperature=1.0, seed=2, max_tokens=16, structured_outputs=run),
    ]
    made = [
        llm.input_processor.process({"prompt_token_ids": [*range(5, 9 + 4 * number), 60 + number]}, each)
        for number, each in enumerate(params)
    ]
    for request in made:
        llm.control.engine.add(request)
    return made


@contextmanager
def raising(llm: LLM, point: str, number: int, error: BaseException, *, after: bool) -> Iterator[list[str]]:
    """Raise at one of the calls of a point, before or after it did its work."""
    runner, raised, passed = llm.control.engine.runner, list[str](), 0
    if point == "accept":
        seqs = [seq for request in llm.control.engine.requests.awaited.values() for seq in request.sequences]
        owner = next(seq.grammar for seq in seqs if seq.grammar is not None)
    else:
        owner = runner.worker if point == "fetch" else runner
    real = getattr(owner, point)
    before = vars(owner).get(point)

    def call(*args: Any) -> Any:
        nonlocal passed
        passed += 1
        due = passed == number
        result = None if due and not after else real(*args)
        if due:
            raised.append(point)
            raise error
        return result

    setattr(owner, point, call)
    try:
        yield raised
    finally:
        if before is None:
            delattr(owner, point)
        else:
            setattr(owner, point, before)


def finish(llm: LLM, added: list[Any]) -> list[list[list[int]]]:
    """Run requests to their ends, through faults, and return their tokens."""
    engine = llm.control.engine
    while engine.has_work:
        with suppress(Fault, KeyboardInterrupt):
            engine.step()
    for request in added:
        engine.abort(request)
    for replica in engine.replicas:
        replica.memory.check_invariants()
        assert replica.memory.num_used_blocks == 0
    return [[seq.output_token_ids for seq in request.sequences] for request in added]


def undisturbed(llm: LLM) -> list[list[list[int]]]:
    return finish(llm, requests(llm))


def interrupted(llm: LLM, number: int) -> dict[str, list[list[list[int]]]]:
    """Return the tokens of the load after a fault and after Ctrl-C at the `number`-th call of each point."""
    found = {}
    for point in POINTS:
        for after in (False, True):
            for error in (Fault(point), KeyboardInterrupt()):
                added = requests(llm)
                with raising(llm, point, number, error, after=after) as raised:
                    tokens = finish(llm, added)
                assert raised, f"the load comes to {point} {number} times"
                found[f"{type(error).__name__} {'after' if after else 'before'} {point}"] = tokens
    return found


def saved(llm: LLM, folder: Path, number: int, **settings: Any) -> list[list[list[list[int]]]]:
    """Save the load's state, as a signal's handler does, at the `number`-th wait at which a draw waits too; return its
    tokens here and from the state on."""
    engine, added, waits = llm.control.engine, requests(llm), 0
    fetch = engine.runner.worker.fetch

    def interrupted(values: Any) -> Any:
        nonlocal waits
        if any(not each.is_started for replica in engine.replicas for each in replica.in_flight):
            waits += 1
            if waits == number:
                llm.save_state(folder)
        return fetch(values)

    engine.runner.worker.fetch = interrupted
    here = finish(llm, added)
    engine.runner.worker.fetch = fetch
    assert waits >= number
    other = LLM.restore_state(folder, **settings)
    outputs = other.resume(use_tqdm=False)
    other.close()
    return [here, [[seq.token_ids for seq in output.outputs] for output in outputs]]
