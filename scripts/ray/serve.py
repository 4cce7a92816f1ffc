"""Serve a model by several replicas over Ray: the server of `jpaged serve`, once for each, behind one address.

    pip install "jpaged[cpu,ray]"
    python scripts/ray/serve.py smollm2-135m --min-replicas 2 --max-replicas 4 --max-model-len 1024

Without `--address` the cluster is this machine and ends with the script; with `--address auto` the replicas start in
the cluster that this machine belongs to. `serve run jpaged.integrations.ray:app model=smollm2-135m` deploys the same
application without this script, and so does a config file with that import path (docs/replicas.md).
"""

from __future__ import annotations

import contextlib
import json
import signal
import threading
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import typer


def main(
    model: Annotated[str, typer.Argument(help="Alias (smollm2-135m), hub id, folder, .gguf file or saved checkpoint.")],
    min_replicas: Annotated[int, typer.Option(min=1, help="Fewest replicas.")] = 1,
    max_replicas: Annotated[int | None, typer.Option(min=1, help="Most replicas. Default: --min-replicas.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8000,
    served_model_name: Annotated[str | None, typer.Option(help="Name of the model in requests.")] = None,
    api_keys_file: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="JSON list of keys, as for jpaged serve.")
    ] = None,
    allow_anonymous: Annotated[bool, typer.Option("--allow-anonymous", help="Any address without keys.")] = False,
    max_model_len: Annotated[int | None, typer.Option(min=1, help="Most tokens of a sequence.")] = None,
    max_num_seqs: Annotated[int | None, typer.Option(min=1, help="Sequences that a replica runs at once (64).")] = None,
    kv_cache_memory_bytes: Annotated[int | None, typer.Option(min=1, help="Bytes of a replica's KV pool.")] = None,
    engine: Annotated[str, typer.Option(help="Further arguments of LLM, as a JSON object.")] = "{}",
    server: Annotated[str, typer.Option(help="Further settings of each server, as a JSON object.")] = "{}",
    routing: Annotated[str, typer.Option(help="prefix, or load.")] = "prefix",
    num_cpus: Annotated[float, typer.Option(min=0, help="Cores that Ray reserves for a replica.")] = 1,
    num_gpus: Annotated[float, typer.Option(min=0, help="GPUs for a replica.")] = 0,
    num_tpus: Annotated[float, typer.Option(min=0, help="TPU chips of one host for a replica.")] = 0,
    warmup: Annotated[bool, typer.Option(help="Compile every shape before requests are taken.")] = True,
    address: Annotated[str | None, typer.Option(help="Ray cluster to use; default: a new one on this machine.")] = None,
) -> None:
    """Serve until SIGINT or SIGTERM."""
    from jpaged.integrations.ray import RayArguments

    limits = {"max_num_seqs": max_num_seqs, "max_model_len": max_model_len}
    limits |= {"kv_cache_memory_bytes": kv_cache_memory_bytes}
    settings = {"model": served_model_name or model, "host": host, "allow_anonymous": allow_anonymous}
    resources: dict[str, Any] = {"num_cpus": num_cpus, "num_gpus": num_gpus}
    try:
        arguments = RayArguments(
            model=model,
            engine={"max_num_seqs": 64} | _with_flags("--engine", engine, limits),
            server=_with_flags("--server", server, settings),
            api_keys_file=api_keys_file,
            warmup=warmup,
            min_replicas=min_replicas,
            max_replicas=max_replicas or min_replicas,
            routing=cast(Literal["prefix", "load"], routing),  # checked there
            resources=resources | ({"resources": {"TPU": num_tpus}} if num_tpus else {}),
        )
    except (ValueError, TypeError) as error:
        raise typer.BadParameter(str(error)) from error
    _serve(arguments, host, port, address)


def _with_flags(option: str, text: str, flags: dict[str, Any]) -> dict[str, Any]:
    """Return a JSON object and what flags of their own gave (None = nothing); refuses one that says something else."""
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise typer.BadParameter(f"{option} {text} is not a JSON object")
    given = {name: value for name, value in flags.items() if value is not None}
    for name in sorted(found.keys() & given.keys()):
        if found[name] != given[name]:
            raise typer.BadParameter(
                f"{option} has {name}={found[name]!r}, and the flag for it {given[name]!r}: give the flag alone"
            )
    return found | given


def _serve(arguments: Any, host: str, port: int, address: str | None) -> None:
    import ray
    from ray import serve

    from jpaged.integrations.ray import app

    ray.init(address=address, include_dashboard=None if address else False)
    serve.start(http_options={"host": host, "port": port})
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    try:
        serve.run(app(arguments))
        typer.echo(f"{arguments.model} is served at http://{host}:{port}/v1")
        with contextlib.suppress(KeyboardInterrupt):
            ended.wait()
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    typer.run(main)
