#!/usr/bin/env bash
# Builds the sdist, and the wheel from it, as a release does; checks them; then uses the wheel as a stranger would: in an
# empty environment, away from the checkout, it answers a prompt with the demo model. On Linux a wheel with loops compiled
# ahead then does the same, without Numba.
#
#   bash scripts/check_wheel.sh          only checks
#   bash scripts/check_wheel.sh dist     leaves both in a folder when they have passed
#   bash scripts/check_wheel.sh --pure   leaves out the wheel with loops, which take a core two minutes
#
# PYTHON chooses the interpreter that .venv is made with (3.11 or later); the default is python3.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/venv.sh

make_venv
install_jpaged test
unset PYTHONDONTWRITEBYTECODE # what an import costs is measured with bytecode, its size without
pure=
[ "${1:-}" != --pure ] || { pure=yes && shift; }
keep=${1:+$(realpath -m "$1")}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# A build writes into the tree and reuses an earlier build's output, so it gets a copy of the tree.
mkdir "$work/source" "$work/elsewhere"
git ls-files -z --cached --others --exclude-standard | xargs -0 cp --parents --target-directory "$work/source"
"$venv" -m build --outdir "$work/dist" "$work/source" >"$work/build.log" 2>&1 || { cat "$work/build.log" >&2; exit 1; }
"$venv" -m twine check --strict "$work"/dist/*

echo "installing the wheel into an empty environment"
"$venv" -m venv "$work/empty"
pip_install "$work/empty/bin/python" "$work"/dist/*.whl
unset PYTHONPATH
"$venv" scripts/install_size.py --environment "$work/empty/bin/python" --most 800
root=$PWD
cd "$work/elsewhere"
# Twice the goals of docs/packages.md: a shared machine may be slower, but an import of JAX takes more than 0.3 s.
"$work/empty/bin/python" "$root/scripts/import_time.py" --most 0.3 --most-help 0.8
where=$("$work/empty/bin/python" -c 'import jpaged; print(jpaged.__file__)')
case $where in
    "$work"/empty/*) ;;
    *) echo "jpaged was imported from $where, not from the wheel" >&2; exit 1 ;;
esac
"$work/empty/bin/jpaged" --version
answers() {
    local answer
    answer=$("$work/empty/bin/jpaged" generate "The capital of France is" --max-tokens 8 --max-model-len 64 \
        --max-num-seqs 1 --max-num-batched-tokens 32)
    echo "$answer"
    case $answer in
        *Paris*) ;;
        *) echo "the answer does not name Paris" >&2; exit 1 ;;
    esac
}
answers

# The same with loops compiled ahead for this processor, those that the demo model calls: all take over a minute.
if [ -z "$pure" ] && [ "$(uname -s)" = Linux ]; then
    echo "building a wheel for this platform"
    demo=(row_ops rotated_heads kv_write zero_pages thread_pool matmul.cpu_kernel "attention.cpu_call:target('float32'"
        screened_argmax packed=True)
    (cd "$root" && "$venv" -m pallas_kernels.build_objects "$work/objects" here --calls "${demo[@]}")
    JPAGED_OBJECTS=$work/objects "$root/$venv" -m build --wheel --outdir "$work/platform" "$work/source" \
        >"$work/build.log" 2>&1 || { cat "$work/build.log" >&2; exit 1; }
    "$root/$venv" -m twine check --strict "$work"/platform/*
    "$work/empty/bin/python" -m pip uninstall --quiet --yes jpaged
    (cd "$root" && pip_install "$work/empty/bin/python" "$(echo "$work"/platform/*.whl)[cpu]")
    "$work/empty/bin/python" -c '
from importlib.util import find_spec
from pallas_kernels import cpu_objects
assert find_spec("numba") is None, "the extra cpu installed Numba"
assert cpu_objects.loaded() is not None, "the loops that were compiled ahead are not used"'
    answers
fi
[ -z "$keep" ] || { mkdir -p "$keep" && cp "$work"/dist/* "$keep"; }
