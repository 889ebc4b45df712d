"""The router of `deploy.ray_serve`. Ray pickles this module by value, so it defines no type that requests are compared with."""

from typing import Any

from ray.serve.request_router import RequestRouter

from deploy.routing import Affinity, Call


class PrefixRouter(RequestRouter):
    """Ranks replicas by prefix and queue. Ray sends the request to the first one that is not full."""

    def initialize_state(self, **_: Any) -> None:
        self._affinity = Affinity()
        self._loads: dict[str, int] = {}  # the last known: Ray's numbers expire

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        call = self._call(pending_request)
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # wait between rounds when all are full
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        names = [name for name in by_name if not call or name not in call.avoid] or list(by_name)
        known = {name: self.replica_queue_len_cache.get(by_name[name].replica_id) for name in by_name}
        self._loads = {n: self._loads.get(n, 0) if load is None else load for n, load in known.items()}
        best = self._affinity.rank(call.keys if call else (), {name: self._loads[name] for name in names})
        return [[by_name[name]] for name in best]

    def on_request_routed(self, pending_request: Any, replica_id: Any, result: Any) -> None:
        if call := self._call(pending_request):
            self._affinity.learn(replica_id.unique_id, call.keys)

    def _call(self, pending_request: Any) -> Call | None:
        first = pending_request.args[0] if pending_request is not None and pending_request.args else None
        return first if isinstance(first, Call) else None
