#!/usr/bin/env bash
# One host with eight chips (v5e-8, v6e-8): a model spread over all of them.
#
#   HF_TOKEN=... bash scripts/tpu/v5e_8.sh
#
# Llama-3.1-8B is 16 GB in bfloat16: 2 GB a chip, one of its eight KV heads a chip, and about 11 GB a chip left for the
# pool. MODEL=meta-llama/Llama-3.3-70B-Instruct is 141 GB: 17.6 GB a chip, which needs v6e-8, and more disk than a TPU VM
# comes with (100 GB): HF_HOME names a folder on another one.
#
# Expect: "8 x TPU v5 lite"; minutes of loading and compiling (less the second time); one answer; then the output
# tokens/s of 256 prompts sent at once, and the most that the chips' memory would allow.
# This script has not run on TPUs yet: tests/aot compiles this step for v5e x8 and checks the memory it needs.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source scripts/venv.sh

make_venv
install_jpaged tpu
"$venv" -c 'import jax; print(jax.device_count(), "x", jax.devices()[0].device_kind); assert jax.device_count() == 8'
model=${MODEL:-meta-llama/Llama-3.1-8B-Instruct}
settings=(--model "$model" --dtype bfloat16 --tensor-parallel-size 8)
.venv/bin/jpaged generate "${settings[@]}" --max-model-len 8192 "The capital of France is"
exec .venv/bin/jpaged bench throughput "${settings[@]}" --num-prompts 256 --max-num-seqs 256 --max-num-batched-tokens 2048
