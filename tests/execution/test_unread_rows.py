"""The last layer leaves out what nobody reads of its results, on a CPU; what is read, and all KV, has the same bits."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny_model import plan, tiny_llama

from jpaged.execution import Bucket, make_step
from jpaged.execution.batch import StepBatch, empty_batch
from jpaged.execution.mesh import make_mesh

TOKENS, SEQS = 24, 4
BUCKET = Bucket(TOKENS, SEQS, False)
LENGTHS = 1, 9, 7
"""Tokens of each sequence in the step; the second one's prompt ends in it, the third one's does not."""
READ = 0, 9


def batch_of(spec, *, reads_all: bool, sample_at: tuple[int, ...] = READ) -> StepBatch:
    """Three prompts from their first tokens on, in blocks of eight tokens."""
    empty = empty_batch(BUCKET, spec, max_num_seqs=SEQS, max_model_len=64)
    number, starts = sum(LENGTHS), np.cumsum((0, *LENGTHS, 0))
    positions = np.zeros(TOKENS, np.int32)
    positions[:number] = np.concatenate([np.arange(length) for length in LENGTHS])
    (attention,) = empty.caches
    table, slots = np.array(attention.table), np.array(attention.slots)
    table[:3, :2] = [[0, 1], [2, 3], [4, 5]]
    of_token = np.repeat(np.arange(3), LENGTHS)
    slots[:number] = table[of_token, positions[:number] // 8] * 8 + positions[:number] % 8
    return empty._replace(
        tokens=np.arange(3, 3 + TOKENS, dtype=np.int32),
        positions=positions,
        query_starts=starts.astype(np.int32),
        kv_lens=np.array([*LENGTHS, 0], np.int32),
        caches=(attention._replace(table=table, slots=slots),),
        sample_at=np.array([*sample_at, *[0] * (SEQS - len(sample_at))], np.int32),
        reads_all=np.array([reads_all]),
    )


def run(layers: int, **options):
    """(pool, sampled rows, hidden states, model) of one step."""
    graphdef, params, groups = tiny_llama(layers=layers)
    spec = plan(groups, 24)
    step = make_step(graphdef, spec, make_mesh(1), kernel_impl="cpu")
    pool, last = jnp.zeros(spec.shape, spec.dtype), jnp.zeros(SEQS, jnp.int32)
    batch = batch_of(spec, **options)
    return (*step(params, pool, batch, last, decode_only=False), nnx.merge(graphdef, params), batch)


@pytest.mark.parametrize("layers", [1, 3])
def test_rows_that_are_read_and_all_kv_have_the_bits_that_they_have_if_all_is_read(layers):
    pool, sampled, hidden, *_ = run(layers, reads_all=False)
    whole_pool, whole_sampled, whole_hidden, *_ = run(layers, reads_all=True)
    np.testing.assert_array_equal(sampled[: len(READ)], whole_sampled[: len(READ)])
    np.testing.assert_array_equal(hidden[np.array(READ)], whole_hidden[np.array(READ)])
    np.testing.assert_array_equal(pool, whole_pool)


def test_the_last_layer_passes_by_rows_behind_the_last_one_that_is_read():
    _, _, hidden, model, batch = run(1, reads_all=False)
    behind = slice(READ[-1] + 1, sum(LENGTHS))
    unchanged = model.norm(model.embed(batch.tokens, batch.positions))
    np.testing.assert_allclose(hidden[behind], unchanged[behind], rtol=1e-6)
    assert np.abs(np.asarray(hidden - unchanged)[np.array(READ)]).min(axis=1).max() > 0


def test_attention_of_the_last_layer_passes_by_rows_that_are_not_read():
    """What a row that is not read gets before one that is read comes from its MLP alone: no key is attended to."""
    _, _, hidden, model, batch = run(1, reads_all=False)
    layer = model.layers.layer(0)
    embedded = model.embed(batch.tokens, batch.positions)
    alone = model.norm(embedded + layer.mlp(layer.post_norm(embedded)))
    np.testing.assert_allclose(hidden[1:9], alone[1:9], rtol=1e-5, atol=1e-6)


def test_a_step_that_does_not_say_what_is_read_computes_all():
    graphdef, params, groups = tiny_llama(layers=2)
    spec = plan(groups, 24)
    step = make_step(graphdef, spec, make_mesh(1), kernel_impl="cpu")
    last = jnp.zeros(SEQS, jnp.int32)
    batch = batch_of(spec, reads_all=True)
    each = [
        step(params, jnp.zeros(spec.shape, spec.dtype), given, last, decode_only=False)[2]
        for given in (batch, batch._replace(reads_all=None))
    ]
    np.testing.assert_array_equal(*(hidden[: sum(LENGTHS)] for hidden in each))
