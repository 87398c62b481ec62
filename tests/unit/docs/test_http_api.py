"""reference/http-api.md: calls, words and bounds that it lists are those of the code. Its errors: test_errors.py."""

from __future__ import annotations

import re
from pathlib import Path

from contextcache.model import DEFAULT_TTL_S, MAX_METADATA_KEYS, SessionState
from gateway.paths import ENGINE_CALLS, OWN_PATHS
from vllm_plugin.turn.history import Why
from vllm_plugin.turn.matching import Outcome

DOCS = Path(__file__).parents[3] / "docs"
PAGES = ("reference/http-api", "guides/contexts", "concepts/append-or-replay", "reference/usage", "guides/streams",
         "guides/retries", "guides/accounting", "guides/kept-conversations", "reference/errors")  # fmt: skip
DOC = re.sub(r"\]\([^)]*\)", "]", "".join((DOCS / f"{page}.md").read_text() for page in PAGES))


def words(text: str) -> set[str]:
    return set(re.findall(r"`([a-z_/][\w/.]*)`", text))


def row(name: str) -> str:
    """Return what the row of a table says, without the name it begins with."""
    (found,) = re.findall(rf"^\| `{name}` \|(.*)$", DOC, re.MULTILINE)
    return str(found)


def test_the_calls_that_reach_the_engine_are_those_that_pass():
    """Seen to fail with `/score` taken out."""
    listed = DOC[DOC.index("The engine's inference calls go") : DOC.index("**Everything else of the engine is 404**")]
    posted = listed.partition("and `POST` on")[2]

    assert {f"POST {path}" for path in words(posted)} | {"GET /v1/models"} == ENGINE_CALLS


def test_the_paths_without_a_key_are_those_of_the_gateway():
    (line,) = re.findall(r"^\| `GET (.*) \| need no key", DOC, re.MULTILINE)

    assert set(re.findall(r"/\w[\w.]*", line)) == OWN_PATHS


def test_the_words_of_a_turn_are_those_of_the_code():
    """Seen to fail with `edited` misspelt."""
    assert {why.value for why in Why} <= words(row("diverged"))
    assert {outcome.value for outcome in Outcome} == words(row("match"))
    assert words(row("state")) == {state.value for state in SessionState}


def test_bounds_are_as_told():
    assert f"default {DEFAULT_TTL_S}" in row("ttl")
    assert f"{MAX_METADATA_KEYS} string keys" in row("metadata")
