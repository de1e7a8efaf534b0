"""QueueRate: how fast the waiting queue empties, and when a client that finds it full should come back."""

from collections import deque

MIN_RETRY_S = 1.0
MAX_RETRY_S = 60.0
"""OpenAI's client, for one, takes no longer waits than this from a server."""
REMEMBERED = 64
"""The rate is that of the latest so many starts."""


def seconds_until_room(requests: int, tokens: int, requests_per_s: float, tokens_per_s: float) -> float:
    """Seconds until a queue that empties at these rates holds so many requests and tokens less; infinity if never."""
    waits = [0.0]
    for amount, per_s in ((requests, requests_per_s), (tokens, tokens_per_s)):
        if amount > 0:
            waits.append(amount / per_s if per_s > 0 else float("inf"))
    return max(waits)


class QueueRate:
    """Watches waiting requests start, on the step's clock (seconds).

    Only starts from a queue that no scheduling pass has emptied count: before, how many started was up to the clients.
    """

    def __init__(self) -> None:
        self._starts: deque[tuple[float, int]] = deque(maxlen=REMEMBERED)
        """(clock, tokens)"""
        self._since: float | None = None
        """Clock of the first pass that left requests waiting, later of the latest start that is not remembered."""
        self._promised_requests = self._promised_tokens = 0
        """Room to come that refused clients were told of."""

    def on_pass(self, now: float, waiting: int) -> None:
        """A scheduling pass left so many requests waiting."""
        if not waiting:
            self._starts.clear()
            self._since = None
            self._promised_requests = self._promised_tokens = 0
        elif self._since is None:
            self._since = now

    def on_start(self, now: float, tokens: int) -> None:
        """A request left the queue, to be computed for the first time."""
        if self._since is None:
            return
        if len(self._starts) == REMEMBERED:
            self._since = self._starts[0][0]
        self._starts.append((now, tokens))
        self._promised_requests = max(0, self._promised_requests - 1)
        self._promised_tokens = max(0, self._promised_tokens - tokens)

    def retry_after(self, now: float, requests: int, tokens: int, own_tokens: int) -> float:
        """Seconds after which a refused request of `own_tokens` will find room, between MIN_RETRY_S and MAX_RETRY_S.

        `requests`, `tokens`: how many must leave the queue before it; below 1 where that limit is not reached. Room is
        promised once: who is refused next is told to come behind this one, or all would come back together for the one
        place that is free by then.
        """
        elapsed = 0.0 if self._since is None else now - self._since
        if not self._starts or elapsed <= 0:
            return min(MAX_RETRY_S, max(MIN_RETRY_S, elapsed))  # nobody knows: it stands as long as it has stood
        ahead = requests + self._promised_requests if requests > 0 else 0
        tokens_ahead = tokens + self._promised_tokens if tokens > 0 else 0
        rates = len(self._starts) / elapsed, sum(tokens for _, tokens in self._starts) / elapsed
        seconds = seconds_until_room(ahead, tokens_ahead, *rates)
        if seconds >= MAX_RETRY_S:
            return MAX_RETRY_S
        self._promised_requests += 1
        self._promised_tokens += own_tokens
        return max(MIN_RETRY_S, seconds)
