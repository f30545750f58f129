"""How fast a run is, without what it does between steps."""

from __future__ import annotations

import time


class Speed:
    """Target tokens a second, without the time that validation and saving take. `recent_seconds`: of the last steps,
    each with 0.95 of the weight of the next."""

    def __init__(self) -> None:
        self._mark = time.monotonic()
        self._tokens = self._seconds = self._recent_tokens = self.recent_seconds = 0.0

    def add(self, tokens: int) -> None:
        """A step ends now, begun at the last `pause`."""
        seconds = time.monotonic() - self._mark
        self._tokens, self._seconds = self._tokens + tokens, self._seconds + seconds
        self._recent_tokens = 0.95 * self._recent_tokens + tokens
        self.recent_seconds = 0.95 * self.recent_seconds + seconds

    def pause(self) -> None:
        self._mark = time.monotonic()

    @property
    def recent(self) -> float:
        """Tokens a second over about the last 20 steps."""
        return self._recent_tokens / max(self.recent_seconds, 1e-9)

    def since_asked(self) -> float:
        tokens, seconds = self._tokens, self._seconds
        self._tokens = self._seconds = 0.0
        return tokens / max(seconds, 1e-9)
