#!/usr/bin/env bash
# One TPU VM with one chip (v5e-1, v6e-1): install, check that JAX sees the chip, answer the demo's prompts.
#
#   bash scripts/tpu/single_vm.sh
#
# Expect: "1 x TPU v5 lite" (or another kind); a few minutes of compiling the first time and under one minute after
# that, as compiled programs are kept; then the answers and tokens/s. Any model that leaves the chip's memory room for a
# useful pool will do: MODEL=Qwen/Qwen3-0.6B bash scripts/tpu/single_vm.sh
#
# This script has not run on a TPU yet: the kernels are compiled for every TPU by tests/aot, and simulated.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
source scripts/venv.sh

make_venv
install_jpaged tpu
"$venv" -c 'import jax; print(jax.device_count(), "x", jax.devices()[0].device_kind); assert jax.default_backend() == "tpu"'
exec .venv/bin/jpaged generate --model "${MODEL:-smollm2-135m}" --dtype bfloat16 --max-model-len 2048 \
    "The capital of France is" "In one sentence, a TPU is"
