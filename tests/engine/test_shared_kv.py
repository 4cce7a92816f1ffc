"""Layers that read another layer's KV take no memory."""

from checkpoints import CHECKPOINTS, make_checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

from jpaged import LLM, SamplingParams


def test_the_memory_report_counts_the_layers_that_keep_kv(tmp_path):
    shared = CHECKPOINTS["llama-shared-kv"]
    make_checkpoint("llama-shared-kv", tmp_path / "shared")
    plain = LlamaConfig.from_dict(shared.to_dict() | {"use_cla": False})
    LlamaForCausalLM(plain).save_pretrained(tmp_path / "plain")
    held = {}
    for name in ("shared", "plain"):
        llm = LLM(
            str(tmp_path / name),
            dtype="float32",
            block_size=8,
            max_num_seqs=1,
            max_num_batched_tokens=32,
            kv_cache_memory_bytes=1 << 20,
        )
        llm.generate({"prompt_token_ids": list(range(3, 33))}, SamplingParams(max_tokens=1), use_tqdm=False)
        (held[name],) = llm.memory_report(peak=True).groups
    assert held["shared"].used == held["plain"].used == 4
    assert 5 * held["shared"].reserved_bytes == 2 * held["plain"].reserved_bytes, "of five layers two keep KV"
