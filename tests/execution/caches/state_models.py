"""Models of running sums, in whole numbers, so that nothing depends on how tokens are batched or cut.

Their layers keep states in the engine's own `StateCache`, by a kernel that only this file knows. Run as a program it
prints the tokens that a model gives on two devices.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Int
from small_schedulers import make_request

from jpaged.execution import Runner, StepSettings, make_mesh, plan_pool
from jpaged.memory import MemoryManager
from jpaged.model_api import AttentionGroup, LayerRef, StateGroup, StatePart
from jpaged.scheduling import Request, Scheduler
from pallas_kernels.recurrent.layout import CARRY, StatePlace, Units, read_states, write_states

VOCAB, WIDTH, LAYERS, MODULUS, BLOCK, INTERVAL = 59, 128, 2, 97, 16, 64
STATES = StateGroup("state", (0, 2), (StatePart("sum", (WIDTH,), "int32"), StatePart("half", (WIDTH // 2,), "int32")))
FULL, WINDOW = AttentionGroup("full", (1,), 2, 64), AttentionGroup("window", (3,), 2, 64, sliding_window=20)
RNG = np.random.default_rng(0)
EMBED, HEAD = RNG.integers(0, 50, (VOCAB, WIDTH)), RNG.integers(0, 3, WIDTH)
NUM_TOKENS = 17


def running_sum(
    view: Array, layer: Array, place: StatePlace, units: Units, x: Int[Array, "tokens width"], *, impl=None
) -> tuple[Array, Array]:
    """Sum up what each sequence was given so far; the state is the sum."""
    before, live = read_states(view, layer, place, units.read), jnp.arange(len(units.start)) < units.num_units
    sums = jnp.concatenate([jnp.zeros((1, x.shape[1]), x.dtype), jnp.cumsum(x, axis=0)])
    totals = sums[units.start + units.length] - sums[units.start]

    def unit(carried, own):
        state, total, read = own
        state = jnp.where(read == CARRY, carried, state)
        return state + total, state

    _, first = lax.scan(unit, jnp.zeros_like(x[0]), (before, totals, units.read))
    of_token = jnp.searchsorted(jnp.where(live, units.start, len(x)), jnp.arange(len(x)), side="right") - 1
    out = first[of_token] + sums[1:] - sums[units.start[of_token]]
    return write_states(view, layer, place, jnp.where(live, units.write, -1), first + totals), out


class Sums(nnx.Module):
    """Two layers of running sums."""

    layer_groups = (STATES,)
    vocab_size = VOCAB

    def __init__(self) -> None:
        self.embed, self.head = nnx.Param(jnp.asarray(EMBED, jnp.int32)), nnx.Param(jnp.asarray(HEAD, jnp.int32))

    def between(self, x, cache, operate):
        """Return the hidden states after the first layer."""
        return x, cache

    def __call__(self, tokens, positions, cache, operate, live_rows=None):
        x = self.embed[...][tokens]
        for layer in range(LAYERS):
            ref = LayerRef("state", layer)
            cache, sums = operate(cache, ref, "sum", running_sum, x, axes=(1,), out_axis=1)
            half = x[:, ::2] * 3
            cache, more = operate(cache, ref, "half", running_sum, half, axes=(1,), out_axis=1)
            x = jnp.mod(sums * (layer + 1) + jnp.repeat(more, 2, axis=1) + x, MODULUS)
            if layer == 0:
                x, cache = self.between(x, cache, operate)
        return x, cache

    def logits(self, hidden, live_rows=None):
        chosen = jnp.mod(hidden @ self.head[...], VOCAB)
        return -jnp.square(chosen[:, None] - jnp.arange(VOCAB)).astype(jnp.float32)


class SumsAndAttention(Sums):
    """The same with layers of full and of windowed attention between, whose results are too small to count."""

    layer_groups = (FULL, STATES, WINDOW)

    def between(self, x, cache, operate):
        heads = x.reshape(len(x), 2, 64).astype(jnp.float32)
        for group in (FULL, WINDOW):
            cache, out = operate(cache, LayerRef(group.name, 0), heads[:, :, None], heads, heads, scale=0.125)
            x = x + (1e-4 * out[:, 0, 0, :1]).astype(jnp.int32)
        return x, cache


def best(tokens: list[int]) -> int:
    """The most likely token after these, from the whole sequence."""
    x = EMBED[tokens]
    for layer in range(LAYERS):
        half = np.repeat(np.cumsum(3 * x[:, ::2], axis=0), 2, axis=1)
        x = (np.cumsum(x, axis=0) * (layer + 1) + half + x) % MODULUS
    return int(x[-1] @ HEAD % VOCAB)


def expected(prompt: list[int], num_tokens: int = NUM_TOKENS) -> list[int]:
    """The tokens that follow a prompt."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(best(tokens))
    return tokens[len(prompt) :]


def make_runner(
    model: Sums, *, num_pages: int = 120, shards: int = 1, most_drafts: int = 0, deterministic: bool = False
) -> Runner:
    groups = {"block_size": BLOCK, "dtype": jnp.dtype("float32"), "shards": shards, "state_interval": INTERVAL}
    groups["most_drafts"] = most_drafts
    page = plan_pool(model.layer_groups, pool_bytes=1 << 24, **groups).layout.page_bytes
    spec = plan_pool(model.layer_groups, pool_bytes=num_pages * page, **groups)
    settings = StepSettings(
        max_num_seqs=4,
        max_num_batched_tokens=160,
        max_model_len=320,
        vocab_size=VOCAB,
        verifies=most_drafts > 0,
        deterministic=deterministic,
    )
    return Runner(*nnx.split(model), spec, make_mesh(shards), settings, can_swap=True)


def make_scheduler(runner: Runner, num_pages: int | None = None, *, budget: int | None = None, **options) -> Scheduler:
    """A scheduler over `num_pages` of a runner's pool, with a prefix cache and as much host memory."""
    layout = runner.spec.layout
    if num_pages is not None:
        layout = runner.spec.resized(num_pages * layout.page_bytes).layout
    budget = budget or runner.settings.max_num_batched_tokens
    memory = MemoryManager(
        layout, watermark=0.0, prefix_caching=True, max_step_tokens=budget, swap_space_bytes=layout.pool_bytes
    )
    return Scheduler(memory, max_num_seqs=4, max_num_batched_tokens=budget, **options)


def serve(runner: Runner, scheduler: Scheduler, requests: Iterable[Request]) -> None:
    """Run requests to their end, one step ahead of the host, as the engine does."""
    for request in requests:
        scheduler.add(request)
    in_flight = None
    while scheduler.has_work or in_flight is not None:
        step = scheduler.schedule()
        dispatched = runner.dispatch(step)
        scheduler.dispatched(step)
        if in_flight is not None:
            scheduler.update(in_flight.step, *in_flight.read_back().sampled)
        in_flight = dispatched
        scheduler.memory.check_invariants()


def greedy(prompt: list[int], num_tokens: int = NUM_TOKENS, **options) -> Request:
    return make_request(prompt, num_tokens, temperature=0, **options)


def prompt(length: int, number: int = 0) -> list[int]:
    return np.random.default_rng(number).integers(0, VOCAB, length).tolist()


PROMPTS = [prompt(length, number) for number, length in enumerate((30, 1, 150, 17, 64, 90))]


if __name__ == "__main__":
    two = make_runner(SumsAndAttention(), shards=2)
    requests = [greedy(tokens) for tokens in PROMPTS[:3]]
    serve(two, make_scheduler(two, 60, budget=40), requests)
    print(json.dumps([request.sequences[0].output_token_ids for request in requests]))
