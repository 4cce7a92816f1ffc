"""The benchmarks by name."""

from __future__ import annotations

from scripts.cases import Cases

BENCHMARKS = Cases(
    "scripts.benchmarks",
    "Runs one benchmark.",
    {
        "memory": "simulate.memory",
        "load": "simulate.load",
        "savings": "simulate.savings",
        "text-savings": "text_savings.text_savings",
        "turns": "turns.turns",
        "preemption": "simulate.preemption",
        "waste": "hybrids.waste",
        "hybrids": "hybrids.hybrids",
        "eviction": "hybrids.eviction",
        "serve-real": "serve_real.serve_real",
        "block-attention": "block_costs.block_attention",
        "block-sizes": "block_costs.block_sizes",
        "swap-costs": "block_costs.swap_costs",
        "throughput": "throughput.throughput",
        "draft-branches": "draft_branches.draft_branches",
        "growth": "growth.growth",
        "peers": "peers.peers",
        "formats": "formats.formats",
        "start": "start.start",
        "first-minute": "start.first_minute",
        "start-phases": "start_phases.start_phases",
        "embeddings": "embeddings.embeddings",
        "remote": "remote.remote",
        "loading-memory": "loading_memory.loading_memory",
        "disk": "disk.disk",
        "lora": "lora.lora",
        "perplexity": "perplexity.perplexities",
        "rounded-activations": "rounded_activations.rounded_activations",
        "against-vllm": "against_vllm.against_vllm",
        "public-reports": "public_reports.public_reports",
        "vllm-judge": "vllm_judge.vllm_judge",
        "scheduler": "micro.scheduler",
        "host": "host.host",
        "allocator": "micro.allocator",
        "products": "products.products",
        "recurrent": "recurrent.recurrent",
    },
)
