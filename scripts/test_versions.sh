#!/usr/bin/env bash
# Runs the tests with another Python and another JAX, in an environment of their own, so that the ends of the ranges in
# pyproject.toml are tried; .github/workflows/tests.yml does it for all of them.
#
#   PYTHON=python3.13 JAX=0.10.0 bash scripts/test_versions.sh           all tests but those that compile for TPUs and GPUs
#   PYTHON=python3.12 bash scripts/test_versions.sh tests/memory -n 0    the newest JAX; arguments are pytest's
#
# EXTRAS chooses what is installed beside jpaged, by default the extra `test`. Without PyTorch, which it brings, what makes no
# checkpoint can be tested, such as tests/memory/test_manager.py, tests/scheduling/test_scheduler.py, tests/text/test_grammar.py
# and tests/execution/caches/test_layer_cache.py: EXTRAS=cpu, and TOOLS="pytest pytest-xdist hypothesis". What answers a prompt
# is then tried by the Python of a page: the environment's python scripts/docs_run.py docs/index.md.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3}
extras=${EXTRAS:-test}
folder=.venv-$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')-jax${JAX:-newest}
[ -x "$folder/bin/python" ] || "$python" -m venv "$folder"
read -ra tools <<<"${TOOLS:-}"
"$folder/bin/python" -m pip install --quiet --disable-pip-version-check --upgrade --upgrade-strategy eager \
    -e ".[$extras]" "jax${JAX:+==$JAX}" "${tools[@]}"
"$folder/bin/python" -c 'import jax, platform; print(f"Python {platform.python_version()}, JAX {jax.__version__}")'
exec "$folder/bin/python" -m pytest -m "not aot" "$@"
