r"""Runs one model on all hosts of a TPU slice (or of a GPU cluster): the same command on each of them.

Create a slice of several hosts, say v5e-16 (4 hosts of 4 chips), and put this repository on all of them:

    gcloud compute tpus tpu-vm create slice --zone us-central1-a --accelerator-type v5litepod-16 \
        --version v2-alpha-tpuv5-lite
    gcloud compute tpus tpu-vm ssh slice --zone us-central1-a --worker all --command 'git clone REPOSITORY jpaged'

(v6e-16 is of --version v2-alpha-tpuv6e.) Install, on all hosts; these images have Python 3.10, so uv fetches another:

    gcloud compute tpus tpu-vm ssh slice --zone us-central1-a --worker all --command \
        'cd jpaged && python3 -m pip install --user uv && ~/.local/bin/uv venv --python 3.12 --seed .venv &&
         .venv/bin/pip install -e ".[tpu]"'

Run, on all hosts at once (HF_TOKEN for a gated model such as this one):

    gcloud compute tpus tpu-vm ssh slice --zone us-central1-a --worker all --command \
        'cd jpaged && HF_TOKEN=... .venv/bin/python scripts/tpu/multi_host.py --model meta-llama/Llama-3.1-8B-Instruct'

On a TPU slice the hosts find each other. Elsewhere give each process the address of process 0, the number of processes
and which it is, which can be tried on one machine without any accelerator:

    export JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=2
    for i in 0 1; do
        .venv/bin/python scripts/tpu/multi_host.py --coordinator localhost:9911 --processes 2 --process $i &
    done; wait

Expect: every host loads its own shards of the weights; the first start compiles for some minutes; then host 0, and it
alone, prints the answers, and all processes exit with status 0. If a host dies, the others say which one and exit with
status 1 within a minute.
"""

from __future__ import annotations

import argparse

import jax


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="alias, hub id or a folder that all hosts have")
    parser.add_argument("--max-tokens", type=int, default=32, help="of each answer (32)")
    parser.add_argument("--coordinator", help="host:port of process 0; on a TPU slice it is found")
    parser.add_argument("--processes", type=int, help="how many")
    parser.add_argument("--process", type=int, help="which of them this is, from 0")
    args = parser.parse_args()

    # A host that dies before the engine is there is noticed by jax, after this many seconds.
    jax.distributed.initialize(args.coordinator, args.processes, args.process, heartbeat_timeout_seconds=30)
    from jpaged import LLM, SamplingParams

    llm = LLM(args.model, tensor_parallel_size=len(jax.devices()))
    print(f"{jax.process_count()} processes, {len(jax.devices())} devices")  # only process 0 comes here
    questions = ["The capital of France is", "Water boils at", "The largest planet is"]
    params = SamplingParams(temperature=0, max_tokens=args.max_tokens)
    for question, output in zip(questions, llm.generate(questions, params), strict=True):
        print(f"{question!r} -> {output.outputs[0].text!r}")


if __name__ == "__main__":
    main()
