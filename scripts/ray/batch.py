"""Answer every prompt of a file with Ray Data: each worker holds an engine, and a batch goes to whichever is free.

    pip install "jpaged[cpu,ray]"
    python scripts/ray/batch.py prompts.jsonl answers --model smollm2-135m --workers 2 --max-tokens 32

The file is JSON lines or Parquet with a column of prompts; what Ray reads, as s3:// and gs:// addresses, will do. The
answers are Parquet files in a folder: the columns there were, and text, token_ids and finish_reason.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer


def main(
    prompts: Annotated[str, typer.Argument(help="File of JSON lines (.jsonl), or file or folder of Parquet.")],
    answers: Annotated[str, typer.Argument(help="Folder for the answers.")],
    model: Annotated[str, typer.Option(help="What LLM takes as a model.")] = "smollm2-135m",
    column: Annotated[str, typer.Option(help="Column of the prompts.")] = "prompt",
    workers: Annotated[int, typer.Option(min=1)] = 1,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts that an engine is given at once.")] = 256,
    max_tokens: Annotated[int, typer.Option(min=1)] = 64,
    temperature: Annotated[float, typer.Option(min=0)] = 0.0,
    engine: Annotated[str, typer.Option(help="Arguments of LLM, as a JSON object.")] = "{}",
    num_cpus: Annotated[float, typer.Option(min=0, help="Cores that Ray reserves for a worker.")] = 1,
    num_gpus: Annotated[float, typer.Option(min=0)] = 0,
    num_tpus: Annotated[float, typer.Option(min=0, help="TPU chips of one host for a worker.")] = 0,
    address: Annotated[str | None, typer.Option(help="Ray cluster to use; default: a new one on this machine.")] = None,
) -> None:
    """Write the answers and tell how many there are."""
    import ray

    from jpaged.integrations.ray.batch import generate

    try:
        settings = dict(json.loads(engine))
    except (ValueError, TypeError) as error:
        raise typer.BadParameter(f"--engine {engine} is not a JSON object") from error
    resources: dict[str, Any] = {"num_cpus": num_cpus, "num_gpus": num_gpus} | (
        {"resources": {"TPU": num_tpus}} if num_tpus else {}
    )
    ray.init(address=address, include_dashboard=None if address else False)
    try:
        read = ray.data.read_json if prompts.endswith((".jsonl", ".json")) else ray.data.read_parquet
        answered = generate(
            read(prompts),
            model,
            engine=settings,
            params={"max_tokens": max_tokens, "temperature": temperature},
            prompt=column,
            workers=workers,
            batch_size=batch_size,
            **resources,
        ).materialize()
        answered.write_parquet(answers)
        typer.echo(f"{answered.count()} answers are in {answers}")
    finally:
        ray.shutdown()


if __name__ == "__main__":
    typer.run(main)
