"""The MLPs of a token's experts in one launch, interpreted, next to float64; tokens do not meet."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tpu_interpreter import run_recording_races

from pallas_kernels.expert_mlps import Biases, DenseChoice, dense_choice, expert_mlps, route, takes, takes_logits, tpu
from pallas_kernels.stacked_row import StackedTable

LAYERS, LAYER, PER_TOKEN = 3, 1, 2


class Chosen(NamedTuple):
    """Lists the experts of each token; the number after the last names none."""

    share: jax.Array
    chosen: jax.Array


def case(tokens, experts=4, embed=128, mlp=128, *, gated=True, seed=0):
    """Return tokens, their experts, of which one is not here, and stacks of tables."""
    rng = np.random.default_rng(seed)

    def drawn(*shape, scale=1.0):
        return jnp.asarray(rng.normal(size=shape) * scale, jnp.bfloat16)

    chosen = np.stack([rng.permutation(experts + 1)[:PER_TOKEN] for _ in range(tokens)])
    choice = Chosen(jnp.asarray(rng.random((tokens, PER_TOKEN)), jnp.bfloat16), jnp.asarray(chosen, jnp.int32))
    columns = (1 + gated) * mlp
    gate_up, down = drawn(LAYERS, experts, embed, columns, scale=0.1), drawn(LAYERS, experts, mlp, embed, scale=0.1)
    return drawn(tokens, embed), choice, gate_up, jnp.pad(down, ((0, 0), (0, 0), (0, 0), (0, -embed % 128)))


@partial(jax.jit, static_argnames=("impl", "gated"))
def run(x, choice, gate_up, down, *, impl="tpu_interpret", gated=True):
    number = jnp.int32(LAYER)
    tables = StackedTable(gate_up, number), StackedTable(down, number)
    return expert_mlps(x, dense(choice, gate_up), *tables, swiglu if gated else jax.nn.silu, gated=gated, impl=impl)


def swiglu(gate, up):
    return jax.nn.silu(gate) * up


def dense(choice, gate_up):
    return dense_choice(*choice, gate_up.shape[1])


def exact(x, choice, gate_up, down, *, gated=True):
    x, gate_up, down, share = (np.asarray(part, np.float64) for part in (x, gate_up[LAYER], down[LAYER], choice.share))
    out = np.zeros(x.shape)
    for token, chosen in enumerate(np.asarray(choice.chosen)):
        for place, expert in enumerate(chosen):
            if expert < len(down):
                both = x[token] @ gate_up[expert]
                first, second = np.split(both, 2) if gated else (both, 1)
                out[token] += (
                    share[token, place] * ((first / (1 + np.exp(-first)) * second) @ down[expert])[: x.shape[1]]
                )
    return out


CASES = {
    "one token": {"tokens": 1},
    "all rows of a few tokens": {"tokens": 24},
    "tiles of rows": {"tokens": 256},
    "few rows an expert": {"tokens": 144, "experts": 40},
    "two chunks": {"tokens": 640},
    "without gates": {"tokens": 160, "gated": False},
    "tokens of no whole registers": {"tokens": 24, "embed": 176},
    "tiles of rows of no whole registers": {"tokens": 160, "embed": 176},
}


@pytest.mark.parametrize("impl", ["tpu_interpret", "reference"])
@pytest.mark.parametrize("name", CASES)
def test_a_token_gets_the_sum_of_its_experts(name, impl):
    gated = CASES[name].get("gated", True)
    given = case(**CASES[name])
    tables = (StackedTable(table, jnp.int32(0)) for table in given[2:])
    assert takes(given[0], *tables, "tpu_interpret", experts=len(given[2][LAYER]))
    found = np.asarray(run(*given, impl=impl, gated=gated), np.float64)
    want = exact(*given, gated=gated)
    np.testing.assert_allclose(found, want, atol=0.02 * np.abs(want).max())


def test_a_wide_expert_comes_in_pieces(monkeypatch):
    """The bytes of a piece are those of a third of the width."""
    given = case(160, mlp=384)
    whole = run(*given)
    monkeypatch.setattr(tpu, "PIECE_BYTES", 3 * 128 * 128 * 2)
    np.testing.assert_allclose(
        np.asarray(jax.jit(run.__wrapped__)(*given), np.float32), np.asarray(whole, np.float32), atol=0.02
    )


@pytest.mark.parametrize("adds_down", [True, False])
@pytest.mark.parametrize("tokens", [16, 160])
def test_biases_are_added_and_columns_of_two_pieces_count_once(tokens, adds_down, monkeypatch):
    """384 columns come as two pieces of 256, of which the second begins within the first."""
    monkeypatch.setattr(tpu, "PIECE_BYTES", 3 * 256 * 256 * 2)
    x, choice, gate_up, down = case(tokens, embed=176, mlp=384)
    assert tpu.tiling(tokens, 176, 384, 3, 4)[1:3] == (256, 2)
    rng, number = np.random.default_rng(1), jnp.int32(LAYER)
    drawn = (jnp.asarray(rng.normal(size=(LAYERS, 4, n)), jnp.bfloat16) for n in (768, 256))
    biases = Biases(*(StackedTable(bias, number) for bias in drawn), adds_down)
    tables = StackedTable(gate_up, number), StackedTable(down, number)

    def combine(gate, up):
        return (up + 1) * gate * jax.nn.sigmoid(1.7 * gate)

    found, want = (
        np.asarray(expert_mlps(x, dense(choice, gate_up), *tables, combine, biases=biases, impl=impl), np.float32)
        for impl in ("tpu_interpret", "reference")
    )
    np.testing.assert_allclose(found, want, atol=0.02 * np.abs(want).max())


def test_an_expert_with_more_tokens_than_a_tile_has_rows_takes_several():
    x, choice, gate_up, down = case(512, experts=8)
    crowded = choice._replace(chosen=jnp.stack([jnp.zeros(512, jnp.int32), 1 + choice.chosen[:, 0] % 7], axis=1))
    want = exact(x, crowded, gate_up, down)
    found = np.asarray(run(x, crowded, gate_up, down), np.float64)
    np.testing.assert_allclose(found, want, atol=0.02 * np.abs(want).max())


@pytest.mark.parametrize("tokens", [32, 160])
def test_a_number_that_is_not_finite_spoils_its_own_token_only(tokens):
    x, choice, gate_up, down = case(tokens)
    clean = np.asarray(run(x, choice, gate_up, down), np.float32)
    found = np.asarray(run(x.at[3, 5].set(jnp.nan).at[7, 2].set(jnp.inf), choice, gate_up, down), np.float32)
    others = np.setdiff1d(np.arange(tokens), [3, 7])
    np.testing.assert_array_equal(found[others], clean[others])
    here = [token for token in (3, 7) if (np.asarray(choice.chosen)[token] < len(down[0])).any()]
    assert here and not np.isfinite(found[here]).all(axis=1).any()


def test_a_result_that_is_rounded_to_infinity_spoils_its_own_token_only():
    """2^127 times 1.998 is finite in float32 and not in bfloat16."""
    x, _, gate_up, down = case(160, gated=False)
    all_of_one = DenseChoice(jnp.zeros((4, 160)).at[0].set(0.5).at[0, 3].set(1.998))
    large = jnp.bfloat16(2.0**63), jnp.bfloat16(2.0**64)
    given = jnp.zeros_like(x).at[3, 0].set(1).at[4:, 1].set(1)
    up = jnp.zeros_like(gate_up).at[LAYER, 0, 0, 0].set(large[0]).at[LAYER, 0, 1, 1].set(1)
    tables = [StackedTable(table, jnp.int32(LAYER)) for table in (up, down.at[LAYER, 0, 0].set(large[1]))]
    out = tpu.expert_mlps(given, all_of_one, *tables, lambda gate: gate, gated=False, interpret=True)
    found = np.asarray(out, np.float32)
    assert not np.isfinite(found[3]).any()
    assert (found[:3] == 0).all()
    np.testing.assert_array_equal(found[4:], np.asarray(down[LAYER, 0, 1][None] / 2, np.float32).repeat(156, axis=0))


def test_matrices_of_experts_without_tokens_are_not_read():
    x, choice, gate_up, down = case(160)
    here = choice._replace(chosen=jnp.where(choice.chosen == 2, 4, choice.chosen))
    spoilt = gate_up.at[LAYER, 2].set(jnp.nan), down.at[LAYER, 2].set(jnp.nan)
    np.testing.assert_array_equal(
        np.asarray(run(x, here, *spoilt), np.float32), np.asarray(run(x, here, gate_up, down), np.float32)
    )


def test_other_tokens_change_no_bit():
    x, choice, gate_up, down = case(160)
    mixed = x.at[80:].set(x[79::-1]), choice._replace(chosen=choice.chosen.at[80:].set(choice.chosen[79::-1]))
    found = run(*mixed, gate_up, down)
    np.testing.assert_array_equal(
        np.asarray(found[:80], np.float32), np.asarray(run(x, choice, gate_up, down)[:80], np.float32)
    )


@pytest.mark.parametrize(("tokens", "buffers"), [(16, 3), pytest.param(160, 2, marks=pytest.mark.nightly)])
def test_a_piece_is_not_overwritten_while_it_is_multiplied(tokens, buffers, monkeypatch):
    monkeypatch.setattr(tpu, "BUFFERS", buffers)
    x, choice, gate_up, down = case(tokens)
    number = jnp.int32(LAYER)
    tables = StackedTable(gate_up, number), StackedTable(down, number)
    multiply = partial(tpu.expert_mlps, activate=swiglu, gated=True)
    out, races = run_recording_races(multiply, x, dense(choice, gate_up), *tables)
    assert not races
    np.testing.assert_allclose(np.asarray(out, np.float64), exact(x, choice, gate_up, down), atol=0.05)


@pytest.mark.parametrize(
    ("tokens", "changes"),
    [(136, {}), (2304, {}), (16 * 97, {}), (64, {"mlp": 96}), (64, {"embed": 72})],
    ids=["half a register", "many tokens", "many chunks", "no whole lanes", "no whole rows"],
)
def test_what_fills_no_registers_is_left_to_others_and_refused(tokens, changes):
    x, choice, gate_up, down = case(tokens, **changes)
    tables = StackedTable(gate_up, jnp.int32(0)), StackedTable(down, jnp.int32(0))
    assert not takes(x, *tables, "tpu_interpret", experts=4)
    with pytest.raises(ValueError, match="are not multiplied here"):
        tpu.expert_mlps(x, dense(choice, gate_up), *tables, swiglu, gated=True)


@pytest.mark.parametrize(
    ("embed", "mlp", "experts", "sizes"),
    [
        (2048, 768, 128, [1, 24, 512, 640, 768, 1408, 2048]),
        (4096, 1024, 512, [1, 128, 512, 1024]),
        (5120, 1536, 160, [1, 512]),
        (7168, 2048, 256, [1, 384]),
        (2880, 2944, 32, [1, 512, 2048]),
    ],
)
def test_a_launch_fits_the_least_memory_however_wide_tokens_are_and_many_the_experts(embed, mlp, experts, sizes):
    for tokens in sizes:
        tiles = tpu.tiling(tokens, embed, mlp, 3, experts)
        assert tiles.vmem_bytes <= 64 << 20
        assert 0 <= tiles.pieces * tiles.width - mlp < tiles.width and tiles.width % 128 == 0
        assert tokens % tiles.chunk == 0 and tokens // tiles.chunk <= 4


@pytest.mark.parametrize(("tokens", "embed", "mlp", "experts"), [(1024, 5120, 1536, 160), (400, 7168, 2048, 256)])
def test_wide_tokens_that_fit_no_chunk_are_left_to_others(tokens, embed, mlp, experts):
    assert tpu.tiling(tokens, embed, mlp, 3, experts) is None


def test_columns_are_taken_if_a_shard_has_whole_lanes():
    x, _, gate_up, down = case(16, mlp=256)
    tables = StackedTable(gate_up, jnp.int32(0)), StackedTable(down, jnp.int32(0))
    assert takes(x, *tables, "tpu", experts=4, column_shards=2)
    assert not takes(x, *tables, "tpu", experts=4, column_shards=4)
    assert not takes(x, *tables, "xla", experts=4)


def test_a_device_with_some_of_the_experts_adds_their_results_only():
    x, choice, gate_up, down = case(160, experts=8)
    number, whole = jnp.int32(LAYER), dense_choice(*choice, 8)
    parts = [
        expert_mlps(
            x,
            DenseChoice(whole.share, first),
            StackedTable(gate_up[:, first : first + 4], number),
            StackedTable(down[:, first : first + 4], number),
            swiglu,
            impl="tpu_interpret",
        )
        for first in (0, 4)
    ]
    np.testing.assert_allclose(
        np.asarray(parts[0] + parts[1], np.float32), np.asarray(run(x, choice, gate_up, down), np.float32), atol=0.03
    )


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize(("tokens", "experts"), [(2, 8), (192, 40), (256, 40)])
def test_the_best_experts_of_a_token_share_it(tokens, experts, scores, corrected):
    rng = np.random.default_rng(tokens)
    logits = rng.normal(size=(tokens, experts)).astype(np.float32)
    logits[0, 3] = logits[0, 5] = logits[0].max() + 1  # of equal ones the first is the first chosen
    correction = rng.normal(size=experts).astype(np.float32) if corrected else None
    choice = route(
        jnp.asarray(logits),
        None if correction is None else jnp.asarray(correction),
        per_token=3,
        scores=scores,
        sums_to_one=True,
        scale=2.5,
        added_to_sum=1e-20,
        least_sum=0.0,
        dtype=jnp.dtype(jnp.float32),
        interpret=True,
    )
    wide = logits.astype(np.float64)
    grown = np.exp(wide - wide.max(axis=1, keepdims=True))
    score = grown / grown.sum(axis=1, keepdims=True) if scores == "softmax" else 1 / (1 + np.exp(-wide))
    worth = wide if correction is None else score + correction
    best = np.argsort(-worth, axis=1, kind="stable")[:, :3]
    want = np.zeros_like(score)
    np.put_along_axis(want, best, np.take_along_axis(score, best, axis=1), axis=1)
    np.testing.assert_allclose(choice.share.T, 2.5 * want / want.sum(axis=1, keepdims=True), atol=1e-6)


def test_logits_that_fill_no_tile_are_refused():
    assert takes_logits(jnp.zeros((1, 8)))
    assert takes_logits(jnp.zeros((640, 8)))
    assert not takes_logits(jnp.zeros((520, 8)))
    assert not takes_logits(jnp.zeros((16, 8), jnp.bfloat16))
    with pytest.raises(ValueError, match="are not routed here"):
        route(
            jnp.zeros((520, 8)),
            None,
            per_token=2,
            scores="softmax",
            sums_to_one=False,
            scale=1.0,
            added_to_sum=0.0,
            least_sum=0.0,
            dtype=jnp.dtype(jnp.float32),
        )


def test_biases_are_counted_as_the_whole_rows_of_registers_that_they_take():
    taken = [tpu.tiling(16, 128, 128, 3, 4, biased).vmem_bytes for biased in (0, 1, 16, 17)]
    assert taken[0] < taken[1] == taken[2] < taken[3]
