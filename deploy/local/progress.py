"""Long steps that say what they are doing: one line when a step starts, one every ten seconds, one at its end.

Lines go to stderr, so that stdout stays free for JSON. Standard library only: the installer runs it before
anything is installed.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from types import TracebackType
from typing import ParamSpec

HEARTBEAT_S = 10.0
"""Silence longer than this looks like a hang."""
LOG_TAIL_LINES = 20
_RUN_BEGINS = "==== run begins at "
"""Begins the line that parts a run's lines in a log from those of the runs before."""
_POLL_S = 0.1
_TAIL_BYTES = 64 << 10
_LINE_CHARS = 100
_Arguments = ParamSpec("_Arguments")


class StepFailed(Exception):
    """A step could not be done; the message says why and what to do, ready to be shown without a traceback."""


def say(line: str) -> None:
    """Print one line of progress."""
    print(line, file=sys.stderr, flush=True)


def exit_code(main: Callable[_Arguments, int | None]) -> Callable[_Arguments, int]:
    """Return `main` with its exit code: 0 for None, 1 with a message where a step failed, 130 on Ctrl-C."""

    @wraps(main)
    def run(*arguments: _Arguments.args, **named: _Arguments.kwargs) -> int:
        try:
            return main(*arguments, **named) or 0
        except StepFailed as failure:
            say(f"error: {failure}")
            return 1
        except KeyboardInterrupt:
            say("stopped")
            return 130

    return run


class Step:
    """A named step with its elapsed time: a context manager that says how it began and how it ended."""

    def __init__(self, what: str, *, print_line: Callable[[str], None] = say) -> None:
        self.what = what
        self._say = print_line
        self._started_s = 0.0
        self._last_said_s = 0.0

    def __enter__(self) -> Step:
        self._started_s = self._last_said_s = time.monotonic()
        self._say(f"  {self.what} …")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        ending = "done" if kind is None else "stopped" if kind is KeyboardInterrupt else "failed"
        self._say(f"  {self.what}: {ending} after {self.elapsed_s:.1f} s")

    @property
    def elapsed_s(self) -> float:
        """Seconds since the step began."""
        return time.monotonic() - self._started_s

    def beat(self, note: Callable[[], str]) -> None:
        """Say that the step is alive when it has been silent for long; `note` is asked only then."""
        now_s = time.monotonic()
        if now_s - self._last_said_s < HEARTBEAT_S:
            return
        self._last_said_s = now_s
        detail = note()[:_LINE_CHARS]
        self._say(f"    {self.what}: {self.elapsed_s:.0f} s{f' · {detail}' if detail else ''}")


def begin_run(log: Path) -> None:
    """Mark the end of a log as the beginning of a run: excerpts show nothing from before it."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as output:
        # On a line of its own: the run before may have ended in the middle of one.
        output.write(f"\n{_RUN_BEGINS}{time.strftime('%Y-%m-%dT%H:%M:%S%z')} ====\n")


def last_lines(path: Path, count: int = LOG_TAIL_LINES) -> list[str]:
    """Return the last non-empty lines of the last run in a log file, oldest first; none when there is no file."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return []
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    begins = max((number for number, line in enumerate(lines, 1) if line.startswith(_RUN_BEGINS)), default=0)
    return lines[begins:][-count:]


def last_line(path: Path) -> str:
    """Return the last line of a log file that says something new, or nothing: warnings repeat themselves."""
    told = (line.strip() for line in reversed(last_lines(path)) if not line.lstrip().startswith("WARNING"))
    return next(told, "")


def log_excerpt(path: Path) -> str:
    """Return the last lines of a log with its path, for an error message."""
    lines = "\n".join(f"    {line}" for line in last_lines(path))
    return f"last lines of {path}:\n{lines or '    (the log is empty)'}"


def run_logged(
    command: Sequence[str], *, what: str, log: Path, env: dict[str, str] | None = None, cwd: Path | None = None
) -> None:
    """Run a command with its output in `log`, saying every ten seconds how far it is.

    The command dies with this process's Ctrl-C. Raises StepFailed with the end of the log.
    """
    begin_run(log)
    with Step(what) as step, log.open("ab") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=env, cwd=cwd)
        try:
            while process.poll() is None:
                time.sleep(_POLL_S)
                step.beat(lambda: last_line(log))
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
        if process.returncode != 0:
            raise StepFailed(f"{what} failed (exit {process.returncode}); {log_excerpt(log)}")
