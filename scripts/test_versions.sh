#!/usr/bin/env bash
# Runs the tests with another Python and another JAX, in an environment of their own, so that the ends of the ranges in
# pyproject.toml are tried; .github/workflows/tests.yml does it for all of them.
#
#   PYTHON=python3.13 JAX=0.10.0 bash scripts/test_versions.sh           all tests but those that compile for TPUs and GPUs
#   PYTHON=python3.12 bash scripts/test_versions.sh tests/memory -n 0    the newest JAX; arguments are pytest's
#
# EXTRAS chooses what is installed beside jpaged, by default the extra `test`; without PyTorch, which it brings, only the
# host rooms (tests/memory, tests/scheduling, tests/text) can be tested: EXTRAS=cpu, and TOOLS="pytest hypothesis".
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
