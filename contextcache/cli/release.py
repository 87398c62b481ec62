"""The version of this command line."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def own_version() -> str:
    """Return the version of the installed distribution, "unknown" for a source tree that is not installed."""
    try:
        return version("context-cache")
    except PackageNotFoundError:
        return "unknown"
