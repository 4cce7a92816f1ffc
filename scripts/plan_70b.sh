#!/usr/bin/env bash
# The table of docs/devices.md: Llama-3.3-70B on eight TPUs or GPUs, compiled for each of them; a few minutes.
#
#   bash scripts/plan_70b.sh [options of `jpaged plan`]
#
# The compilers are looked for in $JPAGED_AOT_ENVS, see scripts/aot_env.sh.
set -uo pipefail
cd "$(dirname "$0")/.." || exit

for device in v5e-8 v6e-8 h200-8; do
    .venv/bin/jpaged plan --model llama-3.3-70b --device "$device" --concurrency 64 --max-num-batched-tokens 512 --block-size 16 "$@"
    echo
done
