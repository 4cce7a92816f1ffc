# shellcheck shell=bash
# Sourced by the other scripts, from the repository's root: a working environment in .venv.
# PYTHON chooses the interpreter that .venv is made with (3.11 or later); the default is python3.
venv=.venv/bin/python

# make_venv: create .venv if there is none.
make_venv() {
    local python=${PYTHON:-python3}
    [ -x "$venv" ] && return
    if ! command -v "$python" >/dev/null; then
        echo "$python was not found; jpaged needs Python 3.11 or later (set PYTHON to choose one)" >&2
        return 1
    fi
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
        echo "$python is $("$python" -V 2>&1); jpaged needs 3.11 or later: set PYTHON to choose one, or make .venv of" \
            "another by 'pip install uv' and 'uv venv --python 3.12 --seed .venv'" >&2
        return 1
    fi
    echo "making .venv with $("$python" -V 2>&1)"
    say_while "making .venv" "$python" -m venv .venv
}

# say_while WHAT COMMAND...: run a command, and say every SAY_EVERY (10) seconds that it goes on.
say_while() {
    local what=$1 ticker status=0
    shift
    (
        seconds=0 every=${SAY_EVERY:-10}
        trap 'kill $! 2>/dev/null; exit' TERM # leaves no sleep that holds the output open
        while sleep "$every" & wait $! && kill -0 $$ 2>/dev/null; do
            seconds=$((seconds + every))
            echo "still $what, $seconds s so far" >&2
        done
    ) &
    ticker=$!
    "$@" || status=$?
    kill "$ticker" 2>/dev/null || true
    wait "$ticker" 2>/dev/null || true
    return "$status"
}

# pip_install PYTHON ARGUMENTS: what `pip install` does, by uv, which takes half a minute of a core where pip takes four; by
# pip where uv cannot be had or fails, as it does where packages come from what pip.conf names. uv is given what pip's
# variables say. Bytecode is made as modules are imported, or at once where PYTHONDONTWRITEBYTECODE forbids that.
pip_install() {
    local python=$1 root pair name value
    shift
    root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
    local uv=$root/.venv/bin/uv options=(--index-strategy unsafe-best-match) pip_options=()
    [ -x "$uv" ] || "$root/$venv" -m pip install --quiet --disable-pip-version-check uv || true
    for pair in "INDEX_URL default-index" "EXTRA_INDEX_URL index" "FIND_LINKS find-links" "CONSTRAINT constraint"; do
        name=PIP_${pair% *}
        for value in ${!name:-}; do options+=("--${pair#* }" "$value"); done
    done
    case ${PIP_NO_INDEX:-0} in 0 | false | no | off) ;; *) options+=(--no-index) ;; esac
    if [ -n "${PYTHONDONTWRITEBYTECODE:-}" ]; then options+=(--compile-bytecode); else pip_options+=(--no-compile); fi
    { [ -x "$uv" ] && "$uv" pip install --quiet --python "$python" "${options[@]}" "$@"; } ||
        "$python" -m pip install --quiet --disable-pip-version-check "${pip_options[@]}" "$@"
}

# install_jpaged [EXTRAS]: install jpaged, editable, with the extras if some are given (test,docs); JAX is for CPUs unless
# one of them is another device's.
# The stamp of an installation is a copy of the pyproject.toml that was installed, one for each extra.
install_jpaged() {
    local stamps=(.venv/jpaged-installed) extra stamp missing=
    for extra in $(tr , ' ' <<<"${1:-}"); do stamps+=(".venv/jpaged-installed-$extra"); done
    for stamp in "${stamps[@]}"; do cmp -s pyproject.toml "$stamp" || missing=yes; done
    [ -n "$missing" ] || return 0
    echo "installing jpaged${1:+ with $1} into .venv: once, for some minutes"
    say_while "installing into .venv" pip_install "$venv" -e ".${1:+[$1]}"
    for stamp in "${stamps[@]}"; do cp pyproject.toml "$stamp"; done
}

# say_versions PYTHON: what tests are about to run with, in the log and, on GitHub, in the run's summary.
say_versions() {
    "$1" -c '
import platform
from importlib.metadata import PackageNotFoundError, version
def said(name):
    try:
        return f"{name} {version(name)}"
    except PackageNotFoundError:
        return f"no {name}"
names = "jpaged", "jax", "jaxlib", "flax", "numpy", "numba", "transformers", "torch"
print("testing with Python", platform.python_version(), "and", ", ".join(map(said, names)))
' | tee -a "${GITHUB_STEP_SUMMARY:-/dev/null}"
}

# make_aot_envs: environments with the compilers of hardware this machine lacks, both at once, where JPAGED_AOT_ENVS says.
make_aot_envs() {
    export JPAGED_AOT_ENVS=${JPAGED_AOT_ENVS:-${XDG_CACHE_HOME:-$HOME/.cache}/jpaged/aot-envs}
    local target made=()
    for target in tpu cuda; do
        PYTHON=$PWD/$venv bash scripts/aot_env.sh "$target" "$JPAGED_AOT_ENVS/$target" ||
            echo "the $target compiler could not be installed in $JPAGED_AOT_ENVS/$target: its tests will be skipped" >&2 &
        made+=($!)
    done
    say_while "installing compilers (2 GB, once)" wait "${made[@]}"
}
