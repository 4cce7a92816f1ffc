"""A quick run of ``jpaged bench throughput`` measures the work that it names, and no compilation."""

from __future__ import annotations

from tiny_chat_model import byte_level_tokenizer, make_chat_model

from jpaged import LLM
from jpaged.bench import throughput


def test_a_quick_run_measures_whole_prompts_and_compiles_nothing_meanwhile(tmp_path, monkeypatch):
    make_chat_model(tmp_path)
    byte_level_tokenizer().save_pretrained(tmp_path)
    sizes = {"max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 512}
    seen, measure = [], throughput.run
    with LLM(tmp_path, dtype="float32", kv_cache_memory_bytes=2**23, **sizes) as llm:

        def watched(*args, **options):
            before = llm.stats()
            found = measure(*args, **options)
            after = llm.stats()
            seen.append((after.num_compiled - before.num_compiled, after.prefix_hits - before.prefix_hits))
            return found

        monkeypatch.setattr(throughput, "run", watched)
        found = throughput.run_quickly(llm)
    (compiled, hits), measured = seen
    assert compiled > 0 and measured == (0, hits)  # of text that the prompts of one run share
    assert (found.num_prompts, found.prompt_tokens, found.output_tokens) == (8, 480, 192)
