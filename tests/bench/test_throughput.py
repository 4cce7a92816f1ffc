"""A quick run of ``jpaged bench throughput`` measures what it names, no compilation, and what a token reads."""

from __future__ import annotations

from checkpoints import make_checkpoint
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


def test_a_token_reads_only_the_experts_that_it_takes(tmp_path):
    config = make_checkpoint("qwen3_moe", tmp_path).config
    with LLM(tmp_path, dtype="float32", kv_cache_memory_bytes=2**22, max_model_len=64, max_num_seqs=1) as llm:
        whole, read = throughput.matrix_bytes(llm), throughput.bytes_of_a_token(llm)
    expert = 3 * config.hidden_size * config.moe_intermediate_size * 4
    left_out = config.num_experts - config.num_experts_per_tok
    assert whole - read == (config.num_hidden_layers - len(config.mlp_only_layers)) * left_out * expert
