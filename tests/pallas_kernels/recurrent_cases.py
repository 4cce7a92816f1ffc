"""Recurrences for the tests: tiny layers of each kind, ragged batches, and what NumPy makes of them, one sequence at a
time in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.recurrent import causal_conv, gated_delta, recurrence, selective_scan, ssd
from pallas_kernels.recurrent.layout import CARRY, UNIT, StatePlace, Units, read_states, write_states

BLOCKS, LAYERS, LAYER, TOKENS, UNITS, ROW = 18, 2, 1, 160, 10, 32


@dataclass(frozen=True)
class Kind:
    """A recurrence in the tests' size.

    `step` is one token in NumPy: ``step(state, constants, *of the token) -> (state, out)`` with the state as the
    kernel's docstring has it; `lies` is the order of its axes in the pool.
    """

    kernel: Callable
    shape: tuple[int, ...]
    lies: tuple[int, ...]
    operands: Callable
    step: Callable
    options: dict = field(default_factory=dict)


def conv_operands(random, ch=40):
    return (random.normal(size=(TOKENS, ch)),), (random.normal(size=(ch, 4)), random.normal(size=ch))


def conv_step(state, constants, x):
    (weight, bias), window = constants, np.concatenate([state, x[:, None]], axis=1)
    y = (window * weight).sum(axis=1) + bias
    return window[:, 1:], y / (1 + np.exp(-y))


def scan_operands(random, ch=24, n=5):
    dt = np.abs(random.normal(size=(TOKENS, ch)))
    x, b, c = random.normal(size=(TOKENS, ch)), *random.normal(size=(2, TOKENS, n))
    return (x, dt, b, c), (-np.exp(random.normal(size=(ch, n))), random.normal(size=ch))


def scan_step(state, constants, x, dt, b, c):
    a, d = constants
    state = np.exp(dt[:, None] * a) * state + (dt * x)[:, None] * b
    return state, state @ c + d * x


def ssd_operands(random, h=6, p=10, g=2, n=16):
    x, dt = random.normal(size=(TOKENS, h, p)), np.abs(random.normal(size=(TOKENS, h)))
    b, c = random.normal(size=(2, TOKENS, g, n))
    return (x, dt, b, c), (-np.exp(random.normal(size=h)), random.normal(size=h))


def ssd_step(state, constants, x, dt, b, c):
    a, d = constants
    b, c = (np.repeat(of, len(a) // len(of), axis=0) for of in (b, c))
    state = np.exp(dt * a)[:, None, None] * state + (dt[:, None] * x)[:, :, None] * b[:, None, :]
    return state, (state * c[:, None, :]).sum(axis=2) + d[:, None] * x


def delta_operands(random, h=3, k=8, v=12):
    q, key = random.normal(size=(2, TOKENS, h, k))
    key /= np.linalg.norm(key, axis=-1, keepdims=True)
    decay, beta = -np.abs(random.normal(size=(TOKENS, h))), random.uniform(size=(TOKENS, h))
    return (q, key, random.normal(size=(TOKENS, h, v)), decay, beta), ()


def delta_step(state, constants, q, k, v, log_decay, beta):
    state = np.exp(log_decay)[:, None, None] * state
    missing = beta[:, None] * (v - np.einsum("hk,hkv->hv", k, state))
    state = state + k[:, :, None] * missing[:, None, :]
    return state, np.einsum("hk,hkv->hv", q, state)


KINDS = {
    "causal_conv": Kind(causal_conv, (40, 3), (1, 0), conv_operands, conv_step, {"activation": "silu"}),
    "selective_scan": Kind(selective_scan, (24, 5), (1, 0), scan_operands, scan_step),
    "ssd": Kind(ssd, (6, 10, 16), (2, 0, 1), ssd_operands, ssd_step),
    "gated_delta": Kind(gated_delta, (3, 8, 12), (0, 1, 2), delta_operands, delta_step),
}

WIDE = {
    "wide selective_scan": Kind(selective_scan, (80, 21), (1, 0), partial(scan_operands, ch=80, n=21), scan_step),
    "wide ssd": Kind(ssd, (6, 16, 32), (2, 0, 1), partial(ssd_operands, p=16, n=32), ssd_step),
    "wide gated_delta": Kind(gated_delta, (2, 32, 48), (0, 1, 2), partial(delta_operands, h=2, k=32, v=48), delta_step),
}
"""The same in sizes of whole vectors, which loops on CPUs multiply as matrices, or keep in registers."""

TILED = {
    "tiled causal_conv": Kind(
        causal_conv, (384, 3), (1, 0), partial(conv_operands, ch=384), conv_step, {"activation": "silu"}
    ),
    "tiled selective_scan": Kind(selective_scan, (1024, 5), (1, 0), partial(scan_operands, ch=1024), scan_step),
    "tiled ssd": Kind(ssd, (32, 64, 16), (2, 0, 1), partial(ssd_operands, h=32, p=64), ssd_step),
    "tiled gated_delta": Kind(gated_delta, (3, 16, 128), (0, 1, 2), partial(delta_operands, k=16, v=128), delta_step),
}
"""The same in sizes of whole tiles of a TPU's memory."""

KINDS_OF_ALL_SIZES = KINDS | WIDE | TILED


@dataclass(frozen=True)
class Run:
    """Neighbouring tokens of one sequence: where it reads its state, the lengths of its units, and what each writes."""

    read: int
    lengths: tuple[int, ...]
    writes: tuple[int, ...]


def cut(decodes: Sequence[Run], prompts: Sequence[Run], *, most: int = UNIT, decodes_only: bool = False) -> Units:
    """Return the units of some runs; the first ones are of one token each."""
    rows, at = [], 0
    for run in [*decodes, *prompts]:
        read = run.read
        for length, write in zip(run.lengths, run.writes, strict=True):
            rows.append((at, length, read, write))
            at, read = at + length, CARRY
    size = TOKENS if decodes_only or most == 1 else UNITS
    padding = [(0, 0, -1, -1)] * (size - len(rows))
    arrays = np.asarray([*rows, *padding], np.int32).T
    return Units(*map(jnp.asarray, arrays), jnp.int32(len(decodes)), jnp.int32(len(rows)), most, decodes_only)


def place_of(kind: Kind, dtype: str = "float32") -> StatePlace:
    return StatePlace(ROW, kind.shape, jnp.dtype(dtype))


@cache
def fresh_view(name: str, pool_dtype: str = "float32", state_dtype: str = "float32") -> jax.Array:
    """Return blocks full of states, between rows of something else."""
    kind, random = KINDS_OF_ALL_SIZES[name], np.random.default_rng(7)
    place = place_of(kind, state_dtype)
    shape = (BLOCKS, LAYERS, ROW + place.rows(pool_dtype) + 32, 128)
    view = jnp.asarray(random.integers(-100, 100, shape)).astype(pool_dtype)
    for layer in range(LAYERS):
        states = jnp.asarray(random.normal(size=(BLOCKS, *kind.shape)), state_dtype)
        view = write_states(view, layer, place, jnp.arange(BLOCKS), states)
    return view


def states_of(kind: Kind, view: jax.Array, ids: Sequence[int], state_dtype: str = "float32") -> np.ndarray:
    """Return the states that blocks hold, in the order of axes of the kernel's docstring."""
    place = place_of(kind, state_dtype).lying(*(kind.shape[axis] for axis in kind.lies))
    states = read_states(view, LAYER, place, jnp.asarray([*ids, -1], jnp.int32))[:-1]
    return np.moveaxis(
        np.asarray(states, np.float64), [axis + 1 for axis in range(states.ndim - 1)], [axis + 1 for axis in kind.lies]
    )


@cache
def compiled(name: str, impl: str, most: int = UNIT, decodes_only: bool = False, state_dtype: str = "float32"):
    """Return ``f(view, units' arrays, operands, constants)`` of a kind; nothing is donated."""
    kind = KINDS_OF_ALL_SIZES[name]
    place = place_of(kind, state_dtype)

    def call(view, arrays, operands, constants):
        units = Units(*arrays, most=most, decodes_only=decodes_only)
        ordered = ordered_operands(name, operands, constants)
        return kind.kernel(view, LAYER, place, units, *ordered, impl=impl, **kind.options)

    return jax.jit(call)


def ordered_operands(name, operands, constants):
    if KINDS_OF_ALL_SIZES[name].kernel in (selective_scan, ssd):
        (x, dt, b, c), (a, d) = operands, constants
        return x, dt, a, b, c, d
    return *operands, *constants


def described(module, name, view, operands, constants, state_dtype="float32"):
    """Return the recurrence, and what a module of kernels says of it: None for what XLA has to do."""
    describe = {"causal_conv": "conv", "selective_scan": "scan", "ssd": "ssd", "gated_delta": "delta"}
    kind, ordered = KINDS_OF_ALL_SIZES[name], ordered_operands(name, operands, constants)
    ordered, of = [*ordered, *kind.options.values()], describe[kind.kernel.__name__]
    what = getattr(recurrence, of)(place_of(kind, state_dtype), *ordered)
    assert module.takes(view, what.place)
    return what, getattr(module, of)(what.place, *ordered)


def arrays_of(units: Units):
    return units.start, units.length, units.read, units.write, units.num_decodes, units.num_units


def run(name, impl, view, units, operands, constants, state_dtype="float32"):
    call = compiled(name, impl, units.most, units.decodes_only, state_dtype)
    operands, constants = (tuple(jnp.asarray(of, jnp.float32) for of in each) for each in (operands, constants))
    return call(view, arrays_of(units), operands, constants)


def expected(name, view, runs: Sequence[Run], operands, constants, state_dtype="float32"):
    """Return what NumPy makes of each run: outputs of all tokens in order, and the states by block."""
    kind, at, outs, states = KINDS_OF_ALL_SIZES[name], 0, [], {}
    for one in runs:
        state = states_of(kind, view, [max(one.read, 0)], state_dtype)[0] * (one.read >= 0)
        for length, write in zip(one.lengths, one.writes, strict=True):
            for token in range(at, at + length):
                state, y = kind.step(state, constants, *(operand[token] for operand in operands))
                outs.append(y)
            at += length
            if write >= 0:
                states[write] = state
    return np.asarray(outs), states


CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def given_operands(name, seed=0):
    return KINDS_OF_ALL_SIZES[name].operands(np.random.default_rng(seed))


def check(name, impl, view, decodes, prompts, operands, constants, **options):
    """Compare outputs, written states and everything that is not to be written."""
    runs = [*decodes, *prompts]
    want, states = expected(name, view, runs, operands, constants)
    operands = [
        np.concatenate([operand[: len(want)], np.full_like(operand[len(want) :], np.nan)]) for operand in operands
    ]
    after, out = run(name, impl, view, cut(decodes, prompts, **options), operands, constants)
    np.testing.assert_allclose(np.asarray(out)[: len(want)], want.reshape(-1, *out.shape[1:]), **CLOSE)
    np.testing.assert_array_equal(np.asarray(out)[len(want) :], 0)
    for block, state in states.items():
        np.testing.assert_allclose(states_of(KINDS_OF_ALL_SIZES[name], after, [block])[0], state, **CLOSE)
    assert_nothing_else_written(name, view, after, states)


def assert_nothing_else_written(name, view, after, states, state_dtype="float32"):
    bits = f"uint{8 * view.dtype.itemsize}"
    before, after = (np.asarray(of).view(bits).copy() for of in (view, after))
    rows = slice(ROW, ROW + place_of(KINDS_OF_ALL_SIZES[name], state_dtype).rows(view.dtype))
    for block in states:
        before[block, LAYER, rows] = after[block, LAYER, rows]
    np.testing.assert_array_equal(before, after)
