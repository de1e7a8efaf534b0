"""CrashLoop: whether the gang fails again and again without serving anything, so that another restart helps nobody."""

from collections.abc import Callable

from actors.step_channel import RankFailure

MAX_FAILURES = 3
WINDOW_S = 60.0


class CrashLoop:
    """Three failures within a minute of the gang's working time and no token in between are the end.

    Restarts take no part of that minute: on a large model one alone is longer. A failure for which requests are given
    up gets the benefit of the doubt, once: it may have been theirs, and the next ones are served. Times: monotonic.
    """

    def __init__(self, now: float) -> None:
        self._worked_s = 0.0
        self._up_since: float | None = now
        self._failures: list[float] = []
        """Since something was served: the working time at each."""
        self._doubted = False

    def served(self) -> None:
        """The gang has computed a token."""
        if self._failures or self._doubted:
            self._failures, self._doubted = [], False

    def failed(self, now: float, given_up: bool = False) -> bool:
        """The gang is down; True: do not start it again. `given_up`: requests were, because of this failure."""
        if self._up_since is not None:
            self._worked_s += now - self._up_since
            self._up_since = None
        self._failures = [at for at in self._failures if self._worked_s - at < WINDOW_S] + [self._worked_s]
        if len(self._failures) < MAX_FAILURES:
            return False
        if given_up and not self._doubted:
            self._failures, self._doubted = [], True
            return False
        return True

    def restarted(self, now: float) -> None:
        """The gang is up."""
        self._up_since = now


def start_patiently(start: Callable[[], None], on_failure: Callable[[RankFailure], None]) -> None:
    """Start a gang; ranks that are lost meanwhile cost another try, but not for ever. Raises what `start` does.

    `on_failure` is told before each further try, to clean up.
    """
    for attempt in range(1, MAX_FAILURES + 1):
        try:
            start()
            return
        except RankFailure as failure:
            if attempt == MAX_FAILURES:
                raise
            on_failure(failure)
