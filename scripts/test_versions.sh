#!/usr/bin/env bash
# Runs the tests with another Python and another JAX, in an environment of their own, so that the ends of the ranges in
# pyproject.toml are tried; .github/workflows/tests.yml does it for all of them.
#
#   PYTHON=python3.13 JAX=0.10.0 bash scripts/test_versions.sh           all tests but those that compile for TPUs and GPUs
#   PYTHON=python3.12 bash scripts/test_versions.sh tests/memory -n 0    the newest JAX; arguments are pytest's
#   LOWEST=1 bash scripts/test_versions.sh                               the lower end of everything jpaged depends on
#   ENVS=/tmp/envs ...                                                   makes the environments there, not here
#
# LOWEST=1 pins each of [project].dependencies in pyproject.toml at the version it begins with (scripts/lowest_versions.py)
# and runs, unless other tests are named, those that need no PyTorch and no family of models that is newer than transformers'
# lower end: tests/test_dependencies.py, in which every one of them has its part, and tests of the host's rooms.
#
# EXTRAS chooses the extras that are installed, by default `test`, which brings PyTorch. Without PyTorch (EXTRAS=cpu and
# TOOLS="pytest pytest-xdist hypothesis") tests that make no checkpoint can run, such as tests/memory/test_manager.py,
# tests/scheduling/test_scheduler.py, tests/text/test_grammar.py and tests/execution/caches/test_layer_cache.py (and others). To
# try an answer as well, run a page's code: the environment's python scripts/docs_run.py docs/index.md.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/venv.sh

python=${PYTHON:-python3}
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
read -ra tools <<<"${TOOLS:-}"
if [ -n "${LOWEST:-}" ]; then
    extras=${EXTRAS:-cpu}
    folder=${ENVS:-.}/.venv-$version-lowest
    tools+=(pytest pytest-xdist hypothesis)
    [ $# -gt 0 ] || set -- tests/test_dependencies.py tests/loading/gguf/test_gguf_weights.py \
        tests/loading/gguf/test_gguf_config.py tests/text/test_grammar.py tests/memory/test_manager.py \
        tests/scheduling/test_scheduler.py tests/execution/caches/test_layer_cache.py
else
    extras=${EXTRAS:-test}
    folder=${ENVS:-.}/.venv-$version-jax${JAX:-newest}
fi
[ -x "$folder/bin/python" ] || "$python" -m venv "$folder"
if [ -n "${LOWEST:-}" ]; then
    "$python" scripts/lowest_versions.py >"$folder/lowest.txt"
    PIP_CONSTRAINT=$(realpath "$folder/lowest.txt")
    export PIP_CONSTRAINT
fi
"$folder/bin/python" -m pip install --quiet --disable-pip-version-check --upgrade --upgrade-strategy eager \
    -e ".[$extras]" "jax${JAX:+==$JAX}" "${tools[@]}"
say_versions "$folder/bin/python"
exec "$folder/bin/python" -m pytest -m "not aot" "$@"
