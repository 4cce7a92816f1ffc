"""The command ``jpaged serve``: the OpenAI-compatible server."""

from __future__ import annotations

import logging
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from jpaged.answers.rows import given_format
from jpaged.cli.engine_options import EngineOptions, with_engine_options
from jpaged.cli.options import (
    THOUGHT_HELP,
    TOOL_HELP,
    bad_parameters,
    check_otel_extra,
    check_serve_extra,
)
from jpaged.cli.waiting import PROGRESS, waiting


@with_engine_options("serve")
def serve(
    model: Annotated[str, typer.Argument(help="Alias (smollm2-135m), hub id, folder, .gguf, URL or saved checkpoint.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8000,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(help="Name of the model in requests, as tiny or claude-*; repeatable. Default: MODEL."),
    ] = None,
    api_key: Annotated[list[str] | None, typer.Option(help="Accepted API key; may be repeated.")] = None,
    admin_api_key: Annotated[
        list[str] | None, typer.Option(help="API key that may also read /metrics and /memory; may be repeated.")
    ] = None,
    api_keys_file: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="JSON list of keys with name, salt, rate, share.")
    ] = None,
    allow_anonymous: Annotated[
        bool, typer.Option("--allow-anonymous", help="Listen on any address without keys.")
    ] = False,
    ssl_certfile: Annotated[Path | None, typer.Option(exists=True, help="Certificate chain, PEM.")] = None,
    ssl_keyfile: Annotated[Path | None, typer.Option(exists=True, help="Private key, PEM.")] = None,
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="Origin whose pages may read answers; may be repeated.")
    ] = None,
    max_body_bytes: Annotated[
        int | None,
        typer.Option(min=1, help="Largest body of a request. Default: 8 MiB and the largest image."),
    ] = None,
    max_waiting_requests: Annotated[int, typer.Option(min=1, help="Most waiting requests; more get 429.")] = 256,
    max_stored_responses: Annotated[int, typer.Option(min=1, help="Most stored responses of a key.")] = 128,
    request_timeout: Annotated[float | None, typer.Option(help="Most seconds of a request. Default: no limit.")] = None,
    read_timeout: Annotated[float, typer.Option(help="Most seconds for a request to arrive, head and body.")] = 30.0,
    stall_timeout: Annotated[float, typer.Option(help="Seconds that a client may stop reading its stream.")] = 60.0,
    drain_seconds: Annotated[float, typer.Option(min=0.0, help="Seconds to end requests after SIGTERM.")] = 30.0,
    tool_parser: Annotated[str | None, typer.Option(help=TOOL_HELP)] = None,
    reasoning_parser: Annotated[str | None, typer.Option(help=THOUGHT_HELP)] = None,
    state_dir: Annotated[
        Path | None, typer.Option(help="Folder of the saved state, from which a restarted server continues.")
    ] = None,
    save_every: Annotated[
        float | None, typer.Option(help="Seconds between two saves, with --state-dir. Default: 30.")
    ] = None,
    otlp_traces_endpoint: Annotated[
        str | None, typer.Option(help="URL of an OpenTelemetry collector for spans of requests.")
    ] = None,
    warmup: Annotated[
        bool | None,
        typer.Option(
            help="Compile all shapes before requests are accepted, or none. "
            "Default: the shapes of the first requests, and the others while the server runs."
        ),
    ] = None,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
    chat_template: Annotated[
        Path | None,
        typer.Option(
            help="A file with a Jinja chat template, in place of the model's own.", exists=True, dir_okay=False
        ),
    ] = None,
    enable_tokenizer_info_endpoint: Annotated[
        bool,
        typer.Option(
            "--enable-tokenizer-info-endpoint", help="Answer /tokenizer_info: special tokens and the chat template."
        ),
    ] = False,
    log_format: Annotated[
        str | None, typer.Option(help="text or json. Default: text on a terminal, json elsewhere.")
    ] = None,
    strict_fields: Annotated[
        bool,
        typer.Option("--strict-fields", help="Refuse fields without effect, which answers otherwise name."),
    ] = False,
    log_prompts: Annotated[
        bool, typer.Option("--log-prompts", help="Write prompts and outputs to the log, a line a request.")
    ] = False,
    enable_mm_embeds: Annotated[
        bool, typer.Option("--enable-mm-embeds", help="Take features of images that clients have encoded.")
    ] = False,
    *,
    engine: EngineOptions,
) -> None:
    """Serve a model over HTTP, as OpenAI's API does.

    Without a key it listens on this machine only. SIGTERM lets running requests end.
    """
    check_serve_extra()
    if otlp_traces_endpoint is not None:
        check_otel_extra()
    from jpaged.server.logs import configure_logs

    engine.check(model, background_compilation=warmup is None)
    with bad_parameters():
        if save_every is not None and state_dir is None:
            raise ValueError(f"--save-every {save_every:g} needs --state-dir, the folder to save to")
        configure_logs(log_level, prompts=log_prompts, log_format=log_format)
    PROGRESS.info("loading the server, for %s", model)

    from jpaged.server.access import Key, read_keys
    from jpaged.server.heaps import limit_heaps
    from jpaged.server.settings import ServerSettings, check_address, claim_state, with_formats
    from jpaged.text.earlier_turns import earlier_turns

    with bad_parameters():
        names = served_model_name or [model]
        if "*" in names[0]:  # a pattern names no model
            names = [model, *names]
        keys = [Key.unnamed(secret) for secret in api_key or ()]
        keys += [Key.unnamed(secret, admin=True) for secret in admin_api_key or ()]
        settings = ServerSettings(
            model=names[0],
            aliases=tuple(names[1:]),
            host=host,
            port=port,
            keys=(*keys, *(read_keys(api_keys_file) if api_keys_file is not None else ())),
            allow_anonymous=allow_anonymous,
            cors_origins=tuple(cors_origin or ()),
            tls_certificate=ssl_certfile,
            tls_key=ssl_keyfile,
            max_body_bytes=max_body_bytes,
            request_timeout=request_timeout,
            read_timeout=read_timeout,
            stall_timeout=stall_timeout,
            drain_seconds=drain_seconds,
            max_waiting=max_waiting_requests,
            max_stored_responses=max_stored_responses,
            tool_parser=given_format(tool_parser),
            reasoning_parser=given_format(reasoning_parser),
            state_dir=state_dir,
            save_every=30.0 if save_every is None else save_every,
            otlp_traces_endpoint=otlp_traces_endpoint,
            log_prompts=log_prompts,
            enable_mm_embeds=enable_mm_embeds,
            tokenizer_info=enable_tokenizer_info_endpoint,
            strict_fields=strict_fields,
        )
        check_address(settings)
        template = None if chat_template is None else chat_template.read_text(encoding="utf-8")
        claim = None if state_dir is None else claim_state(state_dir)  # before anything is loaded or written
    with nullcontext() if claim is None else claim:
        limit_heaps()
        llm = engine.build(model, logs=True, background_compilation=warmup is None, chat_template=template)
        _warn_of_template(llm, settings.tool_parser)
        with bad_parameters():
            settings = with_formats(settings, llm, tool_parser, reasoning_parser)
        logging.getLogger("jpaged.server").info("%s", earlier_turns(llm.tokenizer))
        if warmup:
            with waiting("compiling all programs before the first request", logs=True):
                llm.warmup()

        from jpaged.server.process import run_server

        raise typer.Exit(_run(llm, settings, partial(run_server, claim=claim)))


def _warn_of_template(llm: Any, tool_parser: str | None) -> None:
    """Warn of a tool parser with a chat template that does not show tools: requests with tools would be refused."""
    template = getattr(llm.tokenizer, "chat_template", None)
    if tool_parser is not None and "tools" not in str(template or ""):
        logging.getLogger("jpaged.server").warning(
            "--tool-parser %s: the model's chat template shows no tools; give another by --chat-template FILE",
            tool_parser,
        )


def _run(llm: Any, settings: Any, run_server: Any) -> int:
    from jpaged import AsyncLLM, StateRefused

    engine = AsyncLLM.from_llm(llm, max_waiting_requests=settings.max_waiting)
    say = logging.getLogger("jpaged.server").info
    try:
        return run_server(engine, settings, lambda url: say("%s is served at %s/v1", settings.model, url))
    except (OSError, StateRefused) as error:
        typer.echo(f"the server cannot start: {error}", err=True)
        return 1
    finally:
        sys.stdout.flush()
