"""An engine without a model: a real memory manager whose sequences follow a script, and stats that go with it."""

from __future__ import annotations

import asyncio
from collections import Counter

from jpaged import EngineStats, EngineStopped, MemoryMap
from jpaged.engine.stats import StepTimes
from jpaged.memory import FullAttention, GroupSpec, MemoryManager, PoolLayout, SlidingWindow


class ScriptedEngine:
    """Answers what the memory page asks of an `AsyncLLM`.

    Args:
        num_pages: large pages, each of two blocks of full attention or three of a window, 16 tokens a block.
        unit: a sixth of the bytes of a large page.

    Attributes:
        asked: how many maps were taken.
        hold: set it to keep `memory_map` waiting, as a long step does.
        stopped: whether the engine was shut down.
    """

    def __init__(self, num_pages: int = 120, unit: int = 1) -> None:
        specs = [
            GroupSpec("full", layer_bytes=3 * unit, num_layers=1, block_size=16, policy=FullAttention()),
            GroupSpec("window", layer_bytes=2 * unit, num_layers=1, block_size=16, policy=SlidingWindow(64)),
        ]
        self.manager = MemoryManager(PoolLayout.plan(specs, 6 * unit * num_pages), prefix_caching=True)
        self.names: dict[int, str] = {}
        self.tokens: dict[int, list[int]] = {}
        self.asked = self.steps = self.prompt_tokens = self.output_tokens = self.hits = self.waiting = 0
        self.step_seconds = 0.0
        self.hold: asyncio.Event | None = None
        self.stopped = False

    def begin(self, seq_id: int, tokens: list[int], name: str | None = None) -> None:
        """Add a request with one sequence and compute its prompt."""
        self.manager.add(seq_id, seq_id)
        self.hits += (cached := self.manager.match_prefix(seq_id, tokens))
        assert self.manager.allocate(seq_id, len(tokens), first_write=cached) is not None
        self.manager.commit(seq_id, tokens, len(tokens))
        self.tokens[seq_id] = list(tokens)
        self.prompt_tokens += len(tokens)
        if name is not None:
            self.names[seq_id] = name

    def fork(self, parent: int, child: int) -> None:
        self.manager.fork(parent, child)
        self.tokens[child] = list(self.tokens[parent])

    def step(self, seconds: float = 0.02) -> None:
        """Give every sequence one token."""
        for seq_id, tokens in self.tokens.items():
            tokens.append(1000 + seq_id)
            assert self.manager.allocate(seq_id, len(tokens), first_write=len(tokens) - 1) is not None
            self.manager.commit(seq_id, tokens, len(tokens))
            self.output_tokens += 1
        self.steps += 1
        self.step_seconds += seconds

    def end(self, seq_id: int) -> None:
        self.manager.free(seq_id)
        del self.tokens[seq_id]
        self.names.pop(seq_id, None)

    adapters: tuple[str, ...] = ()

    async def memory_map(self, *, replica: int = 0) -> MemoryMap:
        self.replica = replica
        if self.stopped:
            raise EngineStopped("the engine was shut down")
        self.asked += 1
        if self.hold is not None:
            await self.hold.wait()
        return self.manager.map().named(self.names)

    def stats(self) -> EngineStats:
        manager = self.manager
        times = StepTimes(self.steps, self.step_seconds, 0.02, (self.steps,))
        return EngineStats(
            num_running=len(self.tokens),
            num_waiting=self.waiting,
            num_swapped=0,
            num_steps=self.steps,
            num_computed_tokens=self.prompt_tokens + self.output_tokens,
            num_prompt_tokens=self.prompt_tokens,
            num_output_tokens=self.output_tokens,
            prefix_queries=self.prompt_tokens,
            prefix_hits=self.hits,
            num_adapter_loads=0,
            num_encoded_images=0,
            num_recomputes=0,
            num_swaps=0,
            finished=dict(Counter[str]()),
            blocks=manager.block_counts,
            num_pages=manager.layout.num_pages,
            num_available_pages=manager.num_available_pages,
            num_drafts=0,
            num_draft_tokens=0,
            num_accepted_tokens=0,
            step_times=times,
            num_compiled=0,
            compile_seconds=0.0,
            num_recompiles=0,
            num_compiled_in_background=0,
            num_shapes_to_come=0,
        )


def busy_engine(num_pages: int = 120) -> ScriptedEngine:
    """An engine in the middle of some work: a shared system prompt, a fork, cached blocks and free pages."""
    engine = ScriptedEngine(num_pages)
    system = [7] * 160
    for seq_id, name in enumerate(("alice-1", "bob-1", "carol-1", "dan-1")):
        engine.begin(seq_id, [*system, *([100 + seq_id] * (40 + 70 * seq_id))], name)
    engine.fork(3, 4)
    engine.begin(5, [9] * 200, "erin-1")
    engine.end(1)
    for _ in range(24):
        engine.step()
    engine.waiting = 2
    return engine
