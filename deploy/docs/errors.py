"""The errors that clients see as a table."""

from __future__ import annotations

from contextcache.errors import ERRORS_BY_CODE
from deploy.docs.blocks import table


def statuses() -> dict[str, int]:
    """Return the HTTP status of every code that a client may get."""
    return {code: error.http_status for code, error in ERRORS_BY_CODE.items() if error.is_public}


def errors_table(_name: str) -> str:
    """Return a row for each code that a client may get, by status."""
    rows = sorted(
        (status, code, " ".join((ERRORS_BY_CODE[code].__doc__ or "").split())) for code, status in statuses().items()
    )
    return table(
        ["status", "`code`", "meaning"], ([str(status), f"`{code}`", meaning] for status, code, meaning in rows)
    )
