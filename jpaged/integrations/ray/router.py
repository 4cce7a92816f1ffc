"""Request routers for Ray Serve: by the prefixes that replicas hold, or by load alone."""

from __future__ import annotations

import random
from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from jpaged.integrations.ray.held_chains import ReportReader
from jpaged.integrations.ray.hints import Hint
from jpaged.integrations.ray.prefix_index import Policy, PrefixIndex


class ChoosingRouter(RequestRouter):
    """Follows a request's hint, and ranks the remaining replicas by `ranked`.

    Serve sends each request to the replica that was chosen for it, not to one chosen for an earlier request.
    """

    @abstractmethod
    def ranked(self, hint: Hint, wanted: Mapping[str, RunningReplica]) -> list[list[str]]:
        """Return the names of all candidates in ranks, best first; within a rank the less busy is used.

        Args:
            wanted: the candidates by name; at least one.
        """

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas in ranks; Serve uses the first with a free place."""
        hint = _hint(pending_request)
        named = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        wanted = {name: replica for name, replica in named.items() if name not in hint.avoid} or named
        if hint.only is not None and hint.only in named:
            wanted = {hint.only: named[hint.only]}
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # all ranks were tried: wait before the next attempt
        return [[wanted[name] for name in rank] for rank in self.ranked(hint, wanted)] if wanted else []


class LoadRouter(ChoosingRouter):
    """Sends a request to the less busy of two random replicas, like Serve's own router."""

    def ranked(self, hint: Hint, wanted: Mapping[str, RunningReplica]) -> list[list[str]]:
        """Return two replicas, then the others in case neither has a free place."""
        names = random.sample(list(wanted), len(wanted))
        return [names[:2], names[2:]]


class PrefixRouter(ChoosingRouter):
    """Sends a prompt to the replica that got its longest prefix before, unless that one is overloaded (`Policy`).

    A replica's load is the number of requests that this router sent and has not seen end, or the replica's own report
    if that is higher: other routers send to it too.
    """

    def initialize_state(self, *, overload: int, max_chunks: int, **more: Any) -> None:
        """Take the values of `request_router_kwargs`.

        Args:
            overload: see `Policy`.
            max_chunks: see `PrefixIndex`.

        Raises:
            TypeError: an argument is unknown.
        """
        if more:
            raise TypeError(f"PrefixRouter takes overload and max_chunks, not {sorted(more)}")
        self._index = PrefixIndex(max_chunks)
        self._policy = Policy(self._index, overload=overload)
        self._sent: Counter[ReplicaID] = Counter()
        self._reports: dict[str, ReportReader] = {}

    def ranked(self, hint: Hint, wanted: Mapping[str, RunningReplica]) -> list[list[str]]:
        """Return the replicas as `Policy` ranks them, after what they have reported of their caches."""
        for name, replica in wanted.items():
            if report := getattr(replica, "routing_stats", None):
                self._index.follow(name, self._reports.setdefault(name, ReportReader()).news(report))
        loads = {name: self._load(replica.replica_id) for name, replica in wanted.items()}
        return self._policy.ranked(hint.chain, loads)

    def _load(self, replica: ReplicaID) -> int:
        return max(self._sent[replica], self.replica_queue_len_cache.get(replica) or 0)

    def on_send_request(self, replica_id: ReplicaID) -> None:
        """Count a sent request."""
        super().on_send_request(replica_id)
        self._sent[replica_id] += 1

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Count the end of a request."""
        self._sent[replica_id] = max(0, self._sent[replica_id] - 1)

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Record the prompt of a replica."""
        self._index.add(replica_id.unique_id, _hint(pending_request).chain)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Drop the record of a replica."""
        super().on_replica_actor_died(replica_id)
        self._forget()

    def update_replicas(self, replicas: Sequence[RunningReplica]) -> None:
        """Take the current replicas, and drop the records of ended ones."""
        super().update_replicas(list(replicas))
        self._forget()

    def _forget(self) -> None:
        here = self.curr_replicas
        names = {replica.unique_id for replica in here}
        self._reports = {name: reader for name, reader in self._reports.items() if name in names}
        self._policy.keep_only([replica.unique_id for replica in here])
        self._sent = Counter({replica: count for replica, count in self._sent.items() if replica in here})


def _hint(request: PendingRequest | None) -> Hint:
    """Return the front's hint of a request, or an empty one."""
    if request is None or not request.args or not isinstance(request.args[0], Hint):
        return Hint()
    return request.args[0]
