"""Two allocators on the real engine: the same tokens, and more sequences at once where windows are released."""

from jpaged.benchmarks.memory_real import page, run, table
from jpaged.benchmarks.random_model import gemma3_config


def test_both_allocators_generate_the_same_and_releasing_windows_runs_more_at_once():
    fields = gemma3_config(hidden=128, mlp=96, layers=6, vocab=101, window=16)
    compiled = []
    largest, jenga = run(12, 3, 0, compiled.append, fields)
    assert largest.tokens == jenga.tokens
    assert len(set(map(tuple, jenga.tokens))) == 12, "requests that differ"
    assert jenga.batch > 1.5 * largest.batch and jenga.steps < largest.steps
    assert "largest page: compiled decode step, 1 tokens" in compiled
    assert "Equal outputs: 12 of 12." in table([largest, jenga])
    assert table([largest, jenga]) in page([largest, jenga], "jpaged bench memory-real")
