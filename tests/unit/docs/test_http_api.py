"""reference/http-api.md: the calls that pass, and the paths without a key, are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

from gateway.paths import ENGINE_CALLS, OWN_PATHS

PAGE = (Path(__file__).parents[3] / "docs/reference/http-api.md").read_text()


def test_the_calls_that_reach_the_engine_are_those_that_pass():
    """Seen to fail with `/score` taken out."""
    listed = PAGE[
        PAGE.index("The engine's inference calls go") : PAGE.index("**Everything else of the engine is 404**")
    ]
    posted = listed.partition("and `POST` on")[2]

    assert {f"POST {path}" for path in re.findall(r"`(/[\w/.]+)`", posted)} | {"GET /v1/models"} == ENGINE_CALLS


def test_the_paths_without_a_key_are_those_of_the_gateway():
    """Seen to fail with `/readyz` taken out."""
    (line,) = re.findall(r"^\| `GET (.*) \| need no key", re.sub(r"\]\([^)]*\)", "]", PAGE), re.MULTILINE)

    assert set(re.findall(r"/\w[\w.]*", line)) == OWN_PATHS


def test_a_turn_lists_the_errors_that_share_their_status_with_the_engines():
    """Seen to fail with codes read from the schema alone: 400 and 404 of a turn may also be the engine's."""
    call = PAGE[PAGE.index("### POST /v1/responses\n") :]
    (errors,) = re.findall(r"^\[Errors\]\(errors\.md\): (.*)\.$", call.partition("\n### ")[0], re.MULTILINE)

    assert {"`previous_response_not_found`", "`history_ambiguous`", "`context_not_found`"} <= set(errors.split(", "))
