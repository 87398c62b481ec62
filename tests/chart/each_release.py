"""Checks that hold for every release: one test a check, which names each release that fails and why."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping

import pytest

from tests.chart.releases import RELEASES
from tests.chart.rendering import Release, render, render_ahead

_REASON_CHARS = 240
"""What is shown of one release's reason."""


def in_each_release(check: Callable[..., None]) -> Callable[[], None]:
    """Make one test of a check of `documents`, `release` or both; it goes on after a release that fails."""

    def test() -> None:
        if wrong := failures(check, RELEASES):
            lines = [f"{name}: {reason}" for name, reason in wrong.items()]
            pytest.fail("\n".join([f"wrong in {len(wrong)} of {len(RELEASES)} releases", *lines]), pytrace=False)

    test.__name__, test.__qualname__, test.__doc__ = check.__name__, check.__qualname__, check.__doc__
    test.__module__ = check.__module__
    return test


def failures(check: Callable[..., None], releases: Mapping[str, Release]) -> dict[str, str]:
    """Return the releases that fail, and why; a check that breaks, or a release that does not render, fails too."""
    wanted = inspect.signature(check).parameters
    wrong = {}
    render_ahead(releases.values())
    for name, release in releases.items():
        try:
            given = {"release": release} if "release" in wanted else {}
            check(**given, **({"documents": render(release)} if "documents" in wanted else {}))
        except Exception as fault:  # noqa: BLE001  # whatever it is, the other releases are looked at
            kind = "" if isinstance(fault, AssertionError) else f"{type(fault).__name__}: "
            wrong[name] = kind + " ".join(str(fault).split())[:_REASON_CHARS]
    return wrong
