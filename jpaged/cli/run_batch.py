"""The command ``jpaged run-batch``: answers a file of requests in OpenAI's batch format."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from jpaged.answers.rows import given_format
from jpaged.cli.engine_options import EngineOptions, with_engine_options
from jpaged.cli.options import THOUGHT_HELP, TOOL_HELP, Model, bad_parameters, check_place, check_serve_extra

AGAIN = 75
"""Exit status if some requests have no answer (EX_TEMPFAIL)."""


@with_engine_options("requests")
def run_batch(
    requests_file: Annotated[
        Path, typer.Argument(metavar="IN", exists=True, dir_okay=False, help="File with one request per line.")
    ],
    answers_file: Annotated[
        Path, typer.Argument(metavar="OUT", dir_okay=False, help="File to write: one answer per line.")
    ],
    model: Model = "smollm2-135m",
    served_model_name: Annotated[str | None, typer.Option(help="Name of the model in requests; default: MODEL.")] = (
        None
    ),
    tool_parser: Annotated[str | None, typer.Option(help=TOOL_HELP)] = None,
    reasoning_parser: Annotated[str | None, typer.Option(help=THOUGHT_HELP)] = None,
    *,
    engine: EngineOptions,
) -> None:
    """Answer a file of requests in OpenAI's batch format.

    A repeated command answers only the requests without an answer in OUT. Exits with 1 if a request was refused, in
    this run or an earlier one, and with 75 if the engine failed and some requests have no answer: repeat the command.
    """
    check_serve_extra()
    engine.check(model)
    import asyncio

    from jpaged.claims import claim_file
    from jpaged.server import batch
    from jpaged.server.settings import ServerSettings, with_formats

    with bad_parameters():
        check_place("OUT", answers_file)
        if answers_file.exists() and answers_file.samefile(requests_file):
            raise ValueError(f"OUT {answers_file} is the file of requests, IN {requests_file}: give another file")
        asked = batch.read_requests(requests_file)
        settings = ServerSettings(
            model=served_model_name or model,
            tool_parser=given_format(tool_parser),
            reasoning_parser=given_format(reasoning_parser),
        )
        claim = claim_file(answers_file)  # before it is read: another run appends to it
    with claim:
        with bad_parameters():
            done = batch.answered(answers_file, tidy=False)
        left = [request for request in asked if request.custom_id not in done]
        typer.echo(f"{len(asked)} requests, {len(asked) - len(left)} answered before", err=True)
        llm = engine.build(model) if left else None
        batch.answered(answers_file)  # a run that cannot start leaves the file as it was
        if llm is not None:
            concurrency = 2 * llm.config.max_num_seqs
            with bad_parameters():
                settings = with_formats(settings, llm, tool_parser, reasoning_parser)
                settings = replace(settings, max_waiting=max(256, concurrency))
            try:
                asyncio.run(_answer(llm, settings, left, answers_file, concurrency))
            except batch.Unanswered as error:
                typer.echo(f"{error}; start this command again", err=True)
                raise typer.Exit(AGAIN) from error
        refused = batch.refusals(answers_file, asked) if asked else 0
    if refused:
        typer.echo(
            f"{refused} {'request was' if refused == 1 else 'requests were'} refused; see {answers_file}", err=True
        )
        raise typer.Exit(1)


async def _answer(llm: Any, settings: Any, left: Any, answers_file: Path, concurrency: int) -> int:
    from rich.console import Console
    from rich.progress import Progress

    from jpaged import AsyncLLM
    from jpaged.server.app import create_app
    from jpaged.server.batch import run_batch as run

    async with AsyncLLM.from_llm(llm, max_waiting_requests=settings.max_waiting) as engine:
        with Progress(console=Console(stderr=True)) as progress:
            task = progress.add_task("requests", total=len(left))
            app = create_app(engine, settings)
            return await run(app, left, answers_file, concurrency=concurrency, advance=lambda: progress.advance(task))
