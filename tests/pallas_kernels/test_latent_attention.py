"""Attention to latents: every implementation against dense float64 attention, whose values are part of its keys."""

from dataclasses import dataclass
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ragged_cases import NOWHERE, cast
from tpu_interpreter import run_recording_races

from pallas_kernels import latent_attention as package
from pallas_kernels.kv_codes import decode
from pallas_kernels.latent_attention import latent_attention, latent_write
from pallas_kernels.layout import latent_view_shape
from pallas_kernels.paged_attention import tpu

IMPLS = ["reference", "xla", "cpu", "tpu_interpret"]
SEQS, PAGES, LAYERS, LAYER, TOKENS = 3, 18, 2, 1, 20
SCALE = 0.2


@dataclass(frozen=True)
class Case:
    """Shapes of a batch; equal cases compile once."""

    rank: int
    rotary: int
    heads: int = 3
    block_size: int = 16
    dtype: str = "float32"
    held: str | None = None
    """The view's dtype where that is not `dtype`."""

    @property
    def width(self) -> int:
        return self.rank + self.rotary


CASES = {
    "one tile": Case(46, 14),
    "DeepSeek's widths": Case(512, 64, heads=2),
    "a value that ends within a tile of its key, bfloat16": Case(192, 64, heads=5, dtype="bfloat16"),
    "int8": Case(128, 40, block_size=32, held="int8"),
    "fp8, bfloat16": Case(130, 14, block_size=32, dtype="bfloat16", held="uint8"),
}


@pytest.fixture(autouse=True)
def short_steps(monkeypatch):
    """Steps of 128 keys, so that short contexts take several."""
    monkeypatch.setattr(tpu, "MAX_STEP_KEYS", 128)


@cache
def compiled(impl, case, max_query_len=None):
    return jax.jit(partial(latent_attention, impl=impl, rank=case.rank, scale=SCALE, max_query_len=max_query_len))


@cache
def writer(impl):
    return jax.jit(partial(latent_write, impl=impl))


def make_batch(case, query_lens, contexts, seed=0):
    """(q, view, tables, starts, lens) and each sequence's rows as held; what no query may read is NaN if it can be."""
    random = np.random.default_rng(seed)
    held, tile = case.held or case.dtype, 8 if case.held == "int8" else 1
    blocks = SEQS * PAGES + 2
    shape = latent_view_shape(blocks, LAYERS, case.width, case.block_size, held, tile)
    view = jnp.full(shape, 0x7F, held) if case.held else jnp.full(shape, jnp.nan, held)
    tables = np.full((SEQS, PAGES), NOWHERE, np.int32)
    lens, kv_lens = np.zeros((2, SEQS), np.int32)
    lens[: len(query_lens)] = query_lens
    kv_lens[: len(contexts)] = np.asarray(contexts, np.int32) + lens[: len(contexts)]
    free, rows = list(random.permutation(blocks)), []
    for s in range(SEQS):
        pages = -(-kv_lens[s] // case.block_size)
        tables[s, :pages] = [free.pop() for _ in range(pages)]
        rows.append(random.normal(size=(kv_lens[s], case.width)).astype(np.float32))
        size = PAGES * case.block_size
        slots = np.full(size, -1, np.int32)
        position = np.arange(kv_lens[s])
        slots[: kv_lens[s]] = tables[s, position // case.block_size] * case.block_size + position % case.block_size
        padded = np.zeros((size, case.width), np.float32)
        padded[: kv_lens[s]] = rows[s]
        view = writer("reference")(view, LAYER, padded, slots)
    values = np.asarray(jax.jit(decode)(view[:, LAYER, 0]), np.float64)  # [blocks, tiles, block_size, 128]
    for s in range(SEQS):
        mine = values[tables[s, : -(-kv_lens[s] // case.block_size)]].swapaxes(1, 2)
        rows[s] = mine.reshape(-1, mine.shape[2] * mine.shape[3])[: kv_lens[s], : case.width]
    starts = np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
    q = cast(random.normal(size=(TOKENS, case.heads, case.width)), case.dtype)
    return (q, view, tables, starts, kv_lens), rows


def dense(case, arrays, rows):
    q, _, _, starts, _ = arrays
    out = np.zeros((TOKENS, case.heads, case.rank))
    for s, row in enumerate(rows):
        for token in range(starts[s], starts[s + 1]):
            seen = row[: len(row) - (starts[s + 1] - token) + 1]
            scores = SCALE * q[token].astype(np.float64) @ seen.T
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            out[token] = weights / weights.sum(axis=1, keepdims=True) @ seen[:, : case.rank]
    return out


def assert_close(case, got, want):
    tolerance = 2e-5 if case.dtype == "float32" else 3e-2
    np.testing.assert_allclose(np.asarray(got, np.float64), want, atol=tolerance)


@pytest.mark.parametrize(
    ("impl", "name"),
    [
        *(("xla", name) for name in CASES),
        *((impl, name) for impl in ("reference", "cpu") for name in ("one tile", "DeepSeek's widths")),
        ("tpu_interpret", "a value that ends within a tile of its key, bfloat16"),
        ("tpu_interpret", "int8"),
    ],
)
def test_agrees_with_dense_attention(impl, name):
    case = CASES[name]
    room = PAGES * case.block_size - TOKENS

    @settings(max_examples=5, deadline=None)
    @given(
        queries=st.lists(st.integers(0, 9), max_size=SEQS).filter(lambda lens: sum(lens) <= TOKENS),
        context=st.integers(0, room),
        seed=st.integers(0, 1000),
    )
    def check(queries, context, seed):
        contexts = [context, 0, 5][: len(queries)]
        (q, view, *rest), rows = make_batch(case, queries, contexts, seed)
        got = compiled(impl, case)(q, view, LAYER, *rest)
        assert got.dtype == q.dtype
        assert_close(case, got, dense(case, (q, view, *rest), rows))

    check()


@pytest.mark.parametrize("impl", ["xla", "cpu"])
def test_decodes_alone_give_what_they_give_among_prompts(impl):
    case = CASES["DeepSeek's widths"]
    (q, view, *rest), rows = make_batch(case, [1, 1, 1], [70, 0, 200])
    got = compiled(impl, case, 1)(q, view, LAYER, *rest)
    assert_close(case, got, dense(case, (q, view, *rest), rows))


def test_the_tpu_kernel_has_no_race():
    case = CASES["DeepSeek's widths"]
    (q, view, *rest), rows = make_batch(case, [3, 1, 9], [150, 100, 0])
    run = partial(tpu.paged_attention, value_dim=case.rank, scale=SCALE)
    got, races = run_recording_races(run, jnp.asarray(q)[:, None], view, LAYER, *map(jnp.asarray, rest))
    assert not races
    assert_close(case, got[:, 0], dense(case, (q, view, *rest), rows))


@pytest.mark.parametrize("impl", IMPLS[1:])
@pytest.mark.parametrize("case", [CASES["one tile"], CASES["int8"]], ids=["floats", "codes"])
def test_writes_what_the_reference_writes_and_drops_slots_beyond_the_view(impl, case):
    random = np.random.default_rng(0)
    shape = latent_view_shape(4, LAYERS, case.width, case.block_size, case.held or case.dtype, 8)
    view = jnp.asarray(random.integers(-100, 100, shape)).astype(case.held or case.dtype)
    rows = random.normal(size=(6, case.width)).astype(np.float32)
    slots = np.asarray([3, 4, 5, 4 * case.block_size, -1, case.block_size], np.int32)
    want = writer("reference")(view, LAYER, rows, slots)
    np.testing.assert_array_equal(writer(impl)(view, LAYER, rows, slots), want)
    assert (np.asarray(want) != np.asarray(view)).any()


def test_a_gpu_runs_xlas_version_and_says_so(monkeypatch, caplog):
    case = CASES["one tile"]
    (q, view, *rest), _ = make_batch(case, [1], [3])
    package._say_once.cache_clear()
    got = compiled("gpu", case)(q, view, LAYER, *rest)
    assert "XLA's version runs" in caplog.text
    np.testing.assert_array_equal(got, compiled("xla", case)(q, view, LAYER, *rest))


def test_a_view_of_other_latents_and_a_rank_beyond_them_are_refused():
    (q, view, *rest), _ = make_batch(CASES["DeepSeek's widths"], [1], [3])
    with pytest.raises(ValueError, match="does not hold latents of 128 lanes"):
        latent_attention(q[..., :128], view, LAYER, *rest, rank=100, scale=SCALE)
    with pytest.raises(ValueError, match="rank=577 must be from 1 to the queries' width 576"):
        latent_attention(q, view, LAYER, *rest, rank=577, scale=SCALE)
