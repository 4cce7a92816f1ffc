#!/usr/bin/env bash
# Tries clients of other projects against a served model, in an environment of their own: nightly, or on demand.
#
#     bash scripts/clients/run.sh            # prints the results
#     bash scripts/clients/run.sh --page     # writes them into docs/compatibility.md too
#
# CLIENTS_ENV names the environment (default .clients, made if it is missing); MODEL the served model; PYTHON an
# interpreter that has jpaged with the extra "serve" (default .venv's, which is made with it). It needs npm.
# llama-index has an environment of its own in there: it takes older releases of openai than the other clients.
set -euo pipefail
cd "$(dirname "$0")/../.."
env=$(realpath -m "${CLIENTS_ENV:-.clients}")
model=${MODEL:-smollm2-135m}
if [ -z "${PYTHON:-}" ]; then
  source scripts/venv.sh
  make_venv
  install_jpaged serve
fi
python=${PYTHON:-.venv/bin/python}
for part in "" /llama-index; do
  if [ ! -x "$env$part/bin/pytest" ]; then
    "$python" -m venv "$env$part"
    "$env$part/bin/pip" install --quiet uv # pip takes an hour to find versions that go together
    "$env$part/bin/uv" pip install --quiet --python "$env$part/bin/python" \
      -r "scripts/clients/requirements${part/\//-}.txt"
  fi
done
if [ ! -d "$env/npm/node_modules" ]; then
  mkdir -p "$env/npm"
  npm install --silent --no-fund --no-audit --prefix "$env/npm" openai ai @ai-sdk/openai-compatible zod \
    @anthropic-ai/sdk @anthropic-ai/claude-code @openai/codex
fi
free_port() {
  "$python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'
}
port=$(free_port)
"$python" -m jpaged.cli.main serve "$model" --served-model-name demo --port "$port" --tool-parser hermes \
  --enable-tokenizer-info-endpoint --max-model-len 2048 --max-num-seqs 4 &
server=$!
# Coding agents work in a folder, with a model that is a script.
agent_port=$(free_port)
export JPAGED_AGENT_URL="http://127.0.0.1:$agent_port" JPAGED_AGENT_FOLDER="$env/work"
mkdir -p "$JPAGED_AGENT_FOLDER"
PYTHONPATH=tests/server:tests/engine:tests/models "$python" tests/server/scripted_agent.py \
  "$agent_port" "$JPAGED_AGENT_FOLDER" &
agent_server=$!
trap 'kill $server $agent_server; wait $server $agent_server || true' EXIT
for served in "$server $port" "$agent_server $agent_port"; do
  until curl --silent --fail "http://127.0.0.1:${served#* }/health" > /dev/null; do
    kill -0 "${served% *}" # ends the script if the server has ended
    sleep 1
  done
done
export JPAGED_URL="http://127.0.0.1:$port/v1" JPAGED_CLIENT_ROWS="$env/rows.json"
rm -f "$JPAGED_CLIENT_ROWS"
options=(-p no:cacheprovider -c /dev/null --rootdir scripts/clients/tests scripts/clients/tests "$@")
failed=0
JPAGED_NPM="$env/npm" "$env/bin/pytest" "${options[@]}" || [ $? = 5 ] || failed=1 # 5: -k chose none of them
"$env/llama-index/bin/pytest" "${options[@]}" || [ $? = 5 ] || failed=1
exit $failed
