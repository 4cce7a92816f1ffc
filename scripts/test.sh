#!/usr/bin/env bash
# Runs the test suite: makes or reuses .venv, installs the test extra (with PyTorch, the reference), makes environments
# with the TPU and CUDA compilers (2 GB, apart from .venv), and runs pytest with the arguments given, on two workers.
#
#   bash scripts/test.sh                    what every commit has to pass
#   bash scripts/test.sh --nightly          everything, and properties on three times the examples, with the nightly extra
#   bash scripts/test.sh -m "not aot"       nothing that is compiled for hardware this machine lacks
#   bash scripts/test.sh -n 0               one process; -n 4 takes four, of up to 5 GB each
#
# PYTHON chooses the interpreter that .venv is made with (3.11 or later); the default is python3. JPAGED_AOT_ENVS
# chooses the compilers' folder; the default is in the user's cache. EXTRAS chooses what is installed: the default is test, or
# nightly with --nightly; what is skipped without them runs with EXTRAS=nightly,docs,tunix. JPAGED_NOTHING_MISSING=1
# fails nightly tests whose client or browser (chromium) is missing. PyPI's PyTorch for Linux brings CUDA along:
# PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu gets the small one.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/venv.sh

make_venv
extras=test
[[ " $* " == *" --nightly "* ]] && extras=nightly
install_jpaged "${EXTRAS:-$extras}"
make_aot_envs
say_versions "$venv"
unset PYTHONDONTWRITEBYTECODE # a module is compiled once, not in each of the hundred processes that tests start
echo "starting pytest: it imports jax, torch and transformers and collects the tests, for a minute or more"
# A file stays with one worker, whose fixtures are made once; tests/conftest.py says in which order files are handed out.
exec "$venv" -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@"
