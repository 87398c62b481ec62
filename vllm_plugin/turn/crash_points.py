"""Where a turn process can be told to die in the course of a turn, in order."""

from __future__ import annotations

BEGUN = "turn.begun"
"""The lease is taken (or the session reserved), the prompt not yet put together."""
BEFORE_ENGINE = "turn.before-engine"
MID_STREAM = "turn.mid-stream"
"""A piece of a stream has been sent to the client; passed once a piece."""
BEFORE_COMMIT = "turn.before-commit"
COMMITTED = "turn.committed"
"""The client has not been sent its last bytes."""
BEFORE_ABORT = "turn.before-abort"

POINTS: tuple[str, ...] = (BEGUN, BEFORE_ENGINE, MID_STREAM, BEFORE_COMMIT, COMMITTED, BEFORE_ABORT)
