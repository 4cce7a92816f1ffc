#!/usr/bin/env bash
# Runs the test suite: makes or reuses .venv, installs the test extra (with PyTorch, the reference), makes environments
# with the TPU and CUDA compilers (2 GB, apart from .venv), and runs pytest with the arguments given.
#
#   bash scripts/test.sh                    everything
#   bash scripts/test.sh -m "not aot"       nothing that is compiled for hardware this machine lacks
#
# PYTHON chooses the interpreter that .venv is made with (3.11 or later); the default is python3. JPAGED_AOT_ENVS
# chooses the compilers' folder; the default is in the user's cache. PyPI's PyTorch for Linux brings CUDA along:
# PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu gets the small one.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/venv.sh

make_venv
install_jpaged test
export JPAGED_AOT_ENVS=${JPAGED_AOT_ENVS:-${XDG_CACHE_HOME:-$HOME/.cache}/jpaged/aot-envs}
for target in tpu cuda; do
    PYTHON=$PWD/$venv bash scripts/aot_env.sh "$target" "$JPAGED_AOT_ENVS/$target" ||
        echo "the $target compiler could not be installed in $JPAGED_AOT_ENVS/$target: its tests will be skipped" >&2 &
done
wait
exec "$venv" -m pytest "$@"
