"""The requests of an engine: the replica of each unfinished one, and those that a caller still holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jpaged.engine.replica import Replica
from jpaged.scheduling import Request, Status


class RequestRegistry:
    """Holds an engine's requests by their ids.

    Attributes:
        unfinished: requests that have not ended.
        awaited: requests, finished or not, that their callers have not released by `Engine.abort`; a saved state holds
            these.
        restored: those of `awaited` that came with a saved state and that no caller has taken up yet.
        reassign_ids: gives a new request other ids if a loaded state may have brought the same ids.
    """

    def __init__(self) -> None:
        self.reassign_ids: Callable[[Request], None] = _keep_ids
        self.unfinished: dict[int, Request] = {}
        self.awaited: dict[int, Request] = {}
        self.restored: dict[int, Request] = {}
        self._homes: dict[int, Replica] = {}  # the replica of each unfinished request
        self._finished: list[Request] = []

    def register(self, replica: Replica, request: Request) -> None:
        """Note which replica has an unfinished request."""
        self._homes[request.request_id] = replica
        self.unfinished[request.request_id] = request

    def finish(self, request: Request) -> None:
        """Note that a request has ended; `take_finished` returns it."""
        del self.unfinished[request.request_id]
        self._homes.pop(request.request_id).let_go(request)
        self._finished.append(request)

    def take_finished(self) -> list[Request]:
        """Return the requests that have ended since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def abort(self, request: Request) -> None:
        """Drop a request; one that is finished, or was never registered, is only forgotten."""
        self.unfinished.pop(request.request_id, None)
        self.awaited.pop(request.request_id, None)
        self.restored.pop(request.request_id, None)
        home = self._homes.pop(request.request_id, None)
        if home is not None:
            home.scheduler.abort(request)
            home.let_go(request)
            if not home.has_work:
                home.in_flight.clear()

    def end_all(self) -> None:
        """End all unfinished requests with finish_reason "abort"; their callers can still read them."""
        for request in list(self.unfinished.values()):
            self._homes[request.request_id].scheduler.abort(request)
            self.finish(request)

    def put_back(self, replicas: Sequence[Replica]) -> None:
        """Put all unfinished requests back into the queues of their replicas, over empty memories."""
        for replica in replicas:
            replica.restart()
        for request in list(self.unfinished.values()):
            if request.status is Status.FINISHED:
                self.finish(request)
        for replica in replicas:
            mine = (request for key, request in self.unfinished.items() if self._homes[key] is replica)
            replica.load = sum(len(request.sequences) for request in mine)

    def restored_by_name(self) -> dict[str, Request]:
        """Return the restored requests that no client has taken up, by name, in order of arrival."""
        return {name_of(request): request for request in self.restored.values()}


def name_of(request: Request) -> str:
    """Return the name that the client gave to a request, or its number."""
    return str(request.request_id) if request.name is None else request.name


def _keep_ids(request: Request) -> None:
    """Keep a request's ids, as no saved state was loaded."""
