"""JSON log lines on stderr. An event is a short fixed phrase plus fields; never prompt text, token ids or keys."""

from __future__ import annotations

import json
import logging
import sys
import time
import traceback
from typing import Any

from typing_extensions import override

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}

_CAUSES_MAX = 8
_FRAMES_MAX = 40
"""Maximum number of frames logged of one exception: the innermost frames, nearest to the raise."""


class _JsonLines(logging.Formatter):
    @override
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "event": record.getMessage(),
        }
        line |= {key: value for key, value in vars(record).items() if key not in _STANDARD}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def set_up_logs(level: str = "INFO") -> None:
    """Send this process's log records to stderr as JSON lines. Called once, in `__main__`."""
    stream = logging.StreamHandler(sys.stderr)
    stream.setFormatter(_JsonLines())
    logging.basicConfig(level=level, handlers=[stream], force=True)


def traceback_without_messages(error: BaseException) -> str:
    """Return the frames and types of an exception and its causes, without messages, which may quote a request."""
    parts: list[str] = []
    shown: BaseException | None = error
    while shown is not None and len(parts) < _CAUSES_MAX:
        kind = type(shown)
        frames = "".join(traceback.format_tb(shown.__traceback__, limit=-_FRAMES_MAX))
        parts.append(f"{frames}{kind.__module__}.{kind.__qualname__}")
        shown = shown.__cause__ or (None if shown.__suppress_context__ else shown.__context__)
    return "\n\n".join(reversed(parts))


def show_logs_of(package: str, level: str = "INFO") -> None:
    """Send one package's records to stderr as JSON lines, in a foreign process that would drop their fields.

    Does nothing if the package already has a handler. Idempotent.
    """
    logger = logging.getLogger(package)
    if logger.hasHandlers():
        return
    stream = logging.StreamHandler(sys.stderr)
    stream.setFormatter(_JsonLines())
    logger.addHandler(stream)
    logger.setLevel(level)
