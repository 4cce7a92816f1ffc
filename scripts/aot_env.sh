#!/usr/bin/env bash
# Make a virtual environment that can compile for hardware this machine lacks; does nothing if it was made already.
#
#   bash scripts/aot_env.sh tpu|cuda DIR
#
# It gets the jax version of the Python that runs (PYTHON, else .venv/bin/python, else python3) with libtpu or the
# CUDA 13 plugin, and what jpaged depends on, but not jpaged itself: programs run in it find the working tree on
# PYTHONPATH. It is apart from the working environment because a CPU run with libtpu installed prints warnings.
set -euo pipefail

target=${1:?usage: aot_env.sh tpu|cuda DIR}
dir=${2:?usage: aot_env.sh tpu|cuda DIR}
dir=$(realpath -m "$dir") # venv refuses a link to a folder
root=$(cd "$(dirname "$0")/.." && pwd)
source "$root/scripts/venv.sh"

python=${PYTHON:-$root/.venv/bin/python}
[ -x "$python" ] || python=$(command -v python3)
jax=$("$python" -c 'from importlib.metadata import version; print(version("jax"))')

case $target in
    tpu) packages=("jax[tpu]==$jax") ;;
    cuda)
        packages=("jax==$jax" "jax-cuda13-plugin==$jax" "jax-cuda13-pjrt==$jax")
        # The wheel of Triton has ptxas and the interpreter. One version: what a kernel takes of a GPU varies with it.
        packages+=("jax-triton>=0.3,<0.5" "triton==3.9.0")
        ;;
    *)
        echo "unknown target $target: tpu or cuda" >&2
        exit 2
        ;;
esac
mapfile -O ${#packages[@]} -t packages < <("$python" -c '
import sys, tomllib
print(*tomllib.load(open(sys.argv[1], "rb"))["project"]["dependencies"], sep="\n")' "$root/pyproject.toml")

mkdir -p "$(dirname "$dir")"
exec 9>"$dir.lock" # two workers of the tests may ask for one environment
flock 9
stamp=$dir/installed.txt
wanted=$(printf '%s\n' "${packages[@]}")
[ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] && exit
echo "installing the $target compiler into $dir: about a gigabyte, once, for some minutes"
"$python" -m venv "$dir"
say_while "installing the $target compiler" pip_install "$dir/bin/python" "${packages[@]}"
echo "$wanted" >"$stamp"
