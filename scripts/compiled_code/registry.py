"""The counts by name."""

from __future__ import annotations

from scripts.cases import Cases

COMPILED = Cases(
    "scripts.compiled_code",
    "Counts operations, bytes or cycles in a compiled program.",
    {
        "tpu-attention": "tpu_attention.attention",
        "tpu-calibration": "tpu_recompiled.recompiled",
        "tpu-chip-times": "chip_times.compared",
        "tpu-peers": "tpu_peers.peers",
        "tpu-products": "tpu_products.products",
        "tpu-recurrent": "tpu_recurrent.recurrent",
        "tpu-rows": "tpu_rows.rows",
        "tune": "tpu_tune.tune",
        "tpu-experts": "tpu_experts.experts",
        "tpu-layers": "tpu_layers.layers",
        "whole-steps": "whole_steps.whole_steps",
        "served-loads": "served_loads.served_loads",
        "gpu-bytes": "gpu_bytes.step_bytes",
        "gpu-experts": "gpu_experts.gpu_experts",
        "gpu-peers": "gpu_peers.gpu_peers",
        "gpu-launches": "gpu_launches.launches",
        "gpu-compiles": "gpu_compiles.compiles",
    },
)
