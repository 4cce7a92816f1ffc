"""Settings of a server."""

from __future__ import annotations

import ipaddress
import logging
import re
import socket
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from jpaged.answers.rows import thought_formats, tool_formats
from jpaged.claims import Claim, InUse, claim_folder
from jpaged.errors import StateRefused
from jpaged.server.access import Key
from jpaged.validation import boolean, integer, number, one_of

if TYPE_CHECKING:
    from jpaged import LLM, AsyncLLM


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Settings of one server.

    Attributes:
        model: name of the model in requests and in `/v1/models`; further names in `aliases`.
        aliases: other names of the model; in one, ``*`` stands for any text, as in ``claude-*``.
        host: address to listen on. Without keys it must be a local one.
        port: port to listen on; 0: a free one.
        keys: accepted keys, with different names; none: no key is needed.
        allow_anonymous: whether a server without keys may listen on any address.
        cors_origins: origins whose pages may read answers in a browser; none: no other origin may.
        tls_certificate, tls_key: PEM files; both or neither.
        max_body_bytes: largest body of a request; None: 8 MiB and, where the model takes pictures or videos, the
            largest one in base64.
        request_timeout: seconds after which a request ends with an error; None: no limit.
        read_timeout: seconds within which a request has to arrive, head and body.
        stall_timeout: seconds that a client may stop reading its stream before the request ends.
        ping_interval: seconds of silence after which a stream has a ping.
        health_timeout: seconds within which a step has to end for the engine to be healthy.
        drain_seconds: seconds that running requests have to end after SIGTERM.
        max_waiting: limit on waiting requests; further ones get 429.
        max_stored_responses: limit on stored responses of one key.
        tool_parser: family whose tool calls are read, of `jpaged.answers.rows.ANSWER_FORMATS`; None: tools are refused.
        tokenizer_info: whether `/tokenizer_info` answers.
        strict_fields: whether fields that are accepted but not honoured are refused; see `protocol.field_classes`.
        state_dir: folder of the saved state, from which a restarted server continues; None: nothing is saved.
        save_every: seconds between two saves.
        otlp_traces_endpoint: URL of the OpenTelemetry collector for spans of requests; None: no spans.
        enable_mm_embeds: whether chats may have features of images that their clients have encoded. Only their numbers
            are checked.
        log_prompts: whether the log contains prompts and outputs.
        reasoning_parser: family whose thoughts are split off, of the same table; None: none are.

    Raises:
        ValueError: a value is out of range, two keys share a name, or the server would be open to the network without
            keys.
    """

    model: str
    aliases: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = 8000
    keys: tuple[Key, ...] = field(default=(), repr=False)
    allow_anonymous: bool = False
    cors_origins: tuple[str, ...] = ()
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    max_body_bytes: int | None = None
    request_timeout: float | None = None
    read_timeout: float = 30.0
    stall_timeout: float = 60.0
    ping_interval: float = 10.0
    health_timeout: float = 30.0
    drain_seconds: float = 30.0
    max_waiting: int = 256
    max_stored_responses: int = 128
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    tokenizer_info: bool = False
    strict_fields: bool = False
    state_dir: Path | None = None
    save_every: float = 30.0
    otlp_traces_endpoint: str | None = None
    log_prompts: bool = False
    enable_mm_embeds: bool = False

    def __post_init__(self) -> None:
        integer("port", self.port, low=0, high=65535)
        if self.max_body_bytes is not None:
            integer("max_body_bytes", self.max_body_bytes, low=1)
        integer("max_waiting", self.max_waiting, low=1)
        integer("max_stored_responses", self.max_stored_responses, low=1)
        number("drain_seconds", self.drain_seconds, low=0.0)
        for name in (
            "read_timeout",
            "stall_timeout",
            "ping_interval",
            "health_timeout",
            "request_timeout",
            "save_every",
        ):
            if getattr(self, name) is not None:
                number(name, getattr(self, name), low=0.0, open_low=True)
        boolean("allow_anonymous", self.allow_anonymous)
        boolean("log_prompts", self.log_prompts)
        boolean("enable_mm_embeds", self.enable_mm_embeds)
        boolean("tokenizer_info", self.tokenizer_info)
        boolean("strict_fields", self.strict_fields)
        for name, known in (("tool_parser", tool_formats()), ("reasoning_parser", thought_formats())):
            if getattr(self, name) is not None:
                one_of(name, getattr(self, name), known)
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError(
                f"tls_certificate={self.tls_certificate} and tls_key={self.tls_key} are needed together, or neither"
            )
        names = [key.name for key in self.keys]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"keys={twice} are names of several keys: each key needs a name of its own")
        if not (self.keys or self.allow_anonymous or self.is_local):
            raise ValueError(
                f"host={self.host!r} can be reached from other machines, and there is no key: give --api-key, or "
                "--allow-anonymous to admit everybody"
            )

    def body_bytes(self, max_media_bytes: int) -> int:
        """Return the largest body of a request.

        Args:
            max_media_bytes: see `jpaged.AsyncLLM`.
        """
        return self.max_body_bytes or 8 * 2**20 + -(-max_media_bytes // 3) * 4

    @property
    def is_local(self) -> bool:
        """Tell whether only this machine can reach the address."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def has(self, name: str) -> bool:
        """Tell whether a name is one of the model's, or fits one with ``*``, which stands for any text."""
        patterns = (re.escape(known).replace(r"\*", ".*") for known in self.names if "*" in known)
        return name in self.names or any(re.fullmatch(pattern, name, re.DOTALL) for pattern in patterns)

    @property
    def names(self) -> tuple[str, ...]:
        """Return all names of the model."""
        return (self.model, *self.aliases)


def with_formats(
    settings: ServerSettings, model: LLM | AsyncLLM, tool_parser: str | None = None, reasoning_parser: str | None = None
) -> ServerSettings:
    """Return settings with the answer formats of a model, see `LLM.answer_formats`; the log says what was found.

    Raises:
        ValueError: see `LLM.answer_formats`.
    """
    choice = model.answer_formats(tool_parser, reasoning_parser)
    for flag, what, row, why in (
        ("--tool-parser", "tool calls", choice.tools, choice.why_no_tools),
        ("--reasoning-parser", "thoughts", choice.thoughts, choice.why_no_thoughts),
    ):
        none = f"no {what} are read, as {why}; {flag} names a format"
        if row is not None or why:
            logging.getLogger("jpaged.server").info("%s", none if row is None else f"{what} are read as {row}")
    return replace(settings, tool_parser=choice.tools, reasoning_parser=choice.thoughts)


def check_address(settings: ServerSettings) -> None:
    """Check that the server can listen on its address, before a model is loaded.

    Raises:
        OSError: the address is in use, is unknown, or does not belong to this machine; the message names it.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0]
        socket.create_server(address[:2], family=family).close()
    except OSError as error:
        raise OSError(f"--host {settings.host} --port {settings.port} cannot be listened on: {error}") from error


def claim_state(folder: Path) -> Claim:
    """Claim a folder for this server, best before a model is loaded, so that no other one overwrites its saves.

    Raises:
        StateRefused: another server uses it; the message names its process.
        OSError: the folder cannot be written.
    """
    try:
        return claim_folder(folder)
    except InUse as error:
        raise StateRefused(
            f"state_dir={str(folder)!r} is used by {error.owner}: give each server a folder of its own"
        ) from None
