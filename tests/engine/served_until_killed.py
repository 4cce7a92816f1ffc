"""Answers a file of requests with an engine that saves its state every moment, until somebody kills the process.

    python served_until_killed.py MODEL STATE ANSWERS REQUESTS POOL_BYTES

A restarted process goes on from the state. Answers are appended to a file, one a line, as clients get them; a request
that is neither answered nor in the state is sent again, as a client would whose request was lost.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path

from jpaged import LLM, AsyncLLM, SamplingParams, StateRefused

SETTINGS = {
    "dtype": "float32",
    "block_size": 8,
    "max_num_seqs": 6,
    "max_model_len": 96,
    "max_num_batched_tokens": 16,
    "preemption_mode": "swap",
}


def parameters(number: int) -> SamplingParams:
    temperature = (0.0, 1.0, 0.8)[number % 3]
    return SamplingParams(temperature=temperature, seed=number, max_tokens=20, ignore_eos=True, n=1 + number % 2)


async def serve(model: str, state: Path, answers: Path, requests: Path, pool_bytes: int) -> None:
    prompts = json.loads(requests.read_text())
    lines = answers.read_text().splitlines() if answers.exists() else []
    done = {json.loads(line)[0] for line in lines if line.endswith("]")}
    llm = LLM(model, kv_cache_memory_bytes=pool_bytes, **SETTINGS)
    dispatch = llm.control.engine.runner.dispatch_all

    def late(steps):  # so that there is something to kill
        time.sleep(0.02)
        return dispatch(steps)

    llm.control.engine.runner.dispatch_all = late
    async with AsyncLLM.from_llm(llm) as engine:
        try:
            names = await engine.load_state(state)
        except StateRefused as error:
            assert "has no saved state" in str(error), error
            names = []
        print("ready", len(names), len(done), flush=True)
        engine.save_every(state, 0.05)

        async def finish(name, outputs):
            async for output in outputs:
                last = output
            if name not in done:
                with answers.open("a") as file:
                    print(json.dumps([name, [one.token_ids for one in last.outputs]]), file=file, flush=True)

        each = [finish(name, engine.resume(name)) for name in names]
        for number, prompt in enumerate(prompts):
            name = f"request-{number}"
            if name not in done and name not in names:
                outputs = engine.generate({"prompt_token_ids": prompt}, parameters(number), name)
                each.append(finish(name, outputs))
        await asyncio.gather(*each)
        report = await engine.memory_report()
        used = sum(group.used for group in report.groups)
    llm.control.engine.memory.check_invariants()
    print("leaked", used, len(llm.control.engine.requests.awaited), flush=True)


if __name__ == "__main__":
    model, state, answers, requests, pool_bytes = sys.argv[1:]
    asyncio.run(serve(model, Path(state), Path(answers), Path(requests), int(pool_bytes)))
