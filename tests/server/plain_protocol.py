"""A protocol of sixty lines: lines of text in, lines of text out. `test_protocols.py` adds it to a server."""

from contextlib import aclosing
from dataclasses import replace

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse, Response

from jpaged import RequestOutputKind
from jpaged.server.bodies import Body
from jpaged.server.errors import ClientNames
from jpaged.server.protocol import Protocol
from jpaged.server.serving import serving_of
from jpaged.server.streaming import stream
from jpaged.server.turn import Ended, Text, Turn

router = APIRouter()


class Asked(Body):
    """A request."""

    say: str
    most: int = 8
    live: bool = False


@router.post("/plain", response_model=None)
async def plain(body: Asked, request: Request) -> Response:
    serving = serving_of(request)
    caller = serving.begin(request)
    names = ClientNames(Asked.model_fields, {"max_tokens": "most", "prompt": "say"})
    kind = RequestOutputKind.DELTA if body.live else RequestOutputKind.FINAL_ONLY
    try:
        params = replace(serving.engine.get_default_sampling_params(), max_tokens=body.most, output_kind=kind)
    except ValueError as error:
        raise names.refusal(error) from error
    form = serving.form_of(Turn(messages=[{"role": "user", "content": body.say}], params=params, names=names))

    async def lines():
        async with aclosing(await serving.answer(form, caller)) as steps:
            async for step in steps:
                for event in step.pieces[0].events:
                    if isinstance(event, Text):
                        yield f"say {event.text}\n".encode()
                    elif isinstance(event, Ended):
                        yield f"end {event.reason} {event.output_tokens}\n".encode()

    if body.live:
        return await stream(request, caller, lines(), serving.settings.stall_timeout)
    return PlainTextResponse(b"".join([line async for line in lines()]))


PROTOCOL = Protocol(
    name="plain",
    paths=("/plain",),
    routers=lambda: (router,),
    error=lambda error, request_id: {"wrong": f"{error.param}: {error.message}"},
    error_schema={"type": "object", "required": ["wrong"]},
    error_event="wrong",
    message=lambda body: body["wrong"],
    secret=lambda headers: headers.get("x-plain"),
    secret_header="X-Plain: KEY",
    batch_paths=("/plain",),
    prompts={"/plain": lambda fields: iter([fields.get("say")])},
)
