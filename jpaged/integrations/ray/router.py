"""Ray Serve's request routers: by the prefixes that replicas keep, or by their load alone."""

from __future__ import annotations

import random
from abc import abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from jpaged.integrations.ray.hints import Hint
from jpaged.integrations.ray.prefix_index import Policy, PrefixIndex


class ChoosingRouter(RequestRouter):
    """Sends a request where its hint says it has to go; which of the replicas that may have it comes first is said by
    `ranked`. Serve gives each request the replica that was chosen for it, whatever came before."""

    @abstractmethod
    def ranked(self, hint: Hint, wanted: Mapping[str, RunningReplica]) -> list[list[str]]:
        """Return the names of all replicas that may have a request, in ranks, the preferred first; within a rank the
        less busy is taken.

        Args:
            wanted: those replicas by name; one at least.
        """

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the replicas in ranks; Serve takes the first that has a place."""
        hint = _hint(pending_request)
        named = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        wanted = {name: replica for name, replica in named.items() if name not in hint.avoid} or named
        if hint.only is not None and hint.only in named:
            wanted = {hint.only: named[hint.only]}
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # all ranks were given: wait before they are again
        return [[wanted[name] for name in rank] for rank in self.ranked(hint, wanted)] if wanted else []


class LoadRouter(ChoosingRouter):
    """Sends a request to the less busy of two replicas drawn at random, as Serve's own router does."""

    def ranked(self, hint: Hint, wanted: Mapping[str, RunningReplica]) -> list[list[str]]:
        """Return two replicas, and then the others, for where neither has a place."""
        names = random.sample(list(wanted), len(wanted))
        return [names[:2], names[2:]]


class PrefixRouter(ChoosingRouter):
    """Sends a prompt to the replica that was sent its longest prefix, unless that one is overloaded (`Policy`).

    A replica's load is what this router has sent it and has not seen end or, where that is more, what the replica said
    when it was last asked: other routers send to it too.
    """

    def initialize_state(self, *, overload: int, max_chunks: int, **more: Any) -> None:
        """Take what `request_router_kwargs` hold.

        Args:
            overload: see `Policy`.
            max_chunks: see `PrefixIndex`.

        Raises:
            TypeError: there is an argument more.
        """
        if more:
            raise TypeError(f"PrefixRouter knows overload and max_chunks, not {sorted(more)}")
        self._index = PrefixIndex(max_chunks)
        self._policy = Policy(self._index, overload=overload)
        self._sent: Counter[ReplicaID] = Counter()

    def ranked(self, hint: Hint, wanted: Mapping[str, RunningReplica]) -> list[list[str]]:
        """Return the replicas as `Policy` ranks them."""
        loads = {name: self._load(replica.replica_id) for name, replica in wanted.items()}
        return self._policy.ranked(hint.chain, loads)

    def _load(self, replica: ReplicaID) -> int:
        return max(self._sent[replica], self.replica_queue_len_cache.get(replica) or 0)

    def on_send_request(self, replica_id: ReplicaID) -> None:
        """Count a request that was sent."""
        super().on_send_request(replica_id)
        self._sent[replica_id] += 1

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Count a request that has ended in whatever way."""
        self._sent[replica_id] = max(0, self._sent[replica_id] - 1)

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Remember what a replica has taken."""
        self._index.add(replica_id.unique_id, _hint(pending_request).chain)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Forget what a replica held."""
        super().on_replica_actor_died(replica_id)
        self._forget()

    def update_replicas(self, replicas: Sequence[RunningReplica]) -> None:
        """Take over the replicas that there are, and forget those that have ended."""
        super().update_replicas(list(replicas))
        self._forget()

    def _forget(self) -> None:
        here = self.curr_replicas
        self._index.keep_only([replica.unique_id for replica in here])
        self._sent = Counter({replica: count for replica, count in self._sent.items() if replica in here})


def _hint(request: PendingRequest | None) -> Hint:
    """Return what the front says of a request; a call without a hint has none."""
    if request is None or not request.args or not isinstance(request.args[0], Hint):
        return Hint()
    return request.args[0]
