"""RequestQueue: the waiting requests, oldest first. No operation depends on its length."""

from collections import OrderedDict
from collections.abc import Iterator

from deployments.scheduler.request import Request


class RequestQueue:
    """Waiting requests in order of arrival. A preempted request returns to its place, which is near the head."""

    def __init__(self) -> None:
        self._requests: OrderedDict[str, Request] = OrderedDict()
        self.num_tokens = 0
        """Tokens of the waiting requests: their prompts, and what was generated for them before."""

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests.values())

    def append(self, request: Request) -> None:
        """A new arrival: the youngest of all."""
        self._requests[request.request_id] = request
        self.num_tokens += request.num_tokens

    def remove(self, request: Request) -> None:
        del self._requests[request.request_id]
        self.num_tokens -= request.num_tokens

    def put_back(self, request: Request) -> None:
        """Return a request that was running to its place.

        NOTE: only requests that it overtook while they waited for the encoder cache are older and still queued. They
        are at the head, and the scheduler lets only a few be overtaken, so the walk is short.
        """
        older = []
        for queued in self._requests.values():
            if queued.sequence > request.sequence:
                break
            older.append(queued.request_id)
        self.append(request)
        for request_id in (request.request_id, *reversed(older)):
            self._requests.move_to_end(request_id, last=False)
