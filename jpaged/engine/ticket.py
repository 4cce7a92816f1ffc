"""A client's hold on a request that an engine's thread runs."""

from __future__ import annotations

from dataclasses import dataclass, field

from jpaged.engine.mailbox import Mailbox
from jpaged.scheduling import Request
from jpaged.text.token_reader import Progress


@dataclass(eq=False)
class Ticket:
    """A client's hold on its request. The engine's thread writes it, others read.

    Attributes:
        request: None until `EngineThread.submit` has it.
        aborted: whether somebody asked for the request's end.
        ended: whether the last of its progress, or an error, is on its way to the mailbox.
    """

    request_id: str
    mailbox: Mailbox[Progress] = field(default_factory=Mailbox)
    request: Request | None = None
    aborted: bool = False
    ended: bool = False

    @property
    def waiting(self) -> bool:
        """Tell whether the request was not admitted to the batch yet."""
        return not self.ended and (self.request is None or self.request.first_scheduled_time is None)

    def end(self, content: Progress | Exception) -> None:
        """Put the last thing the client gets."""
        self.ended = True
        self.mailbox.put(content)
