"""Clients that know nothing of contexts: from the turn after a crash on they compute what is new, and read the same."""

from __future__ import annotations

import json
import secrets

import pytest

from tests.kit.clients import CLIENTS
from tests.kit.kept_kv import common, kept_manifests, kill_and_start
from tests.kit.stack import KEEPING_KEY, KEY
from tests.kit.until import wait_until

pytestmark = [pytest.mark.timeout(1500), pytest.mark.thorough]

BLOCK_TOKENS = 32
"""Of the engine."""
TURNS = [
    "Name a river.",
    "And a lake?",
    "And a sea?",
    "Which of them is the largest?",
    "Which is the deepest?",
    "Name a town on it.",
]


def test_each_client_computes_what_is_new_to_it_after_engine_and_sidecar_were_killed(stack, keeper):
    names = [f"{kind.__name__}-{secrets.token_hex(4)}" for kind in CLIENTS]
    kept = [kind(stack.url, KEEPING_KEY, name) for kind, name in zip(CLIENTS, names, strict=True)]
    plain = [kind(stack.url, KEY, name) for kind, name in zip(CLIENTS, names, strict=True)]
    rows, texts = [], []
    try:
        for number, text in enumerate(TURNS):
            if number == 3:
                kill_and_start(stack)
            for one, other in zip(kept, plain, strict=True):
                mine = list(asked(stack, one, text))
                rows += [row | {"client": one.name, "turn": number + 1} for row in mine]
                texts.append(([row["text"] for row in mine], [answer.text for answer in other.ask(text)]))
    finally:
        for one in (*kept, *plain):
            one.close()

    for row in rows:
        print(json.dumps(row))
    assert [row for row in rows if row["computed"] > row["new"] + row["more"]] == []
    assert [row for row in rows if row["turn"] > 3 and row["cached"] == 0] == []
    assert [pair for pair in texts if pair[0] != pair[1]] == []


def asked(stack, client, text):
    """Ask, and return of each call what was computed and what was new, as the engine cut its prompt."""
    before = {manifest.cache_ref: manifest.token_ids for manifest in kept_manifests(stack)}
    for answered in client.ask(text):
        num_tokens = answered.prompt_tokens + answered.answer_tokens

        def saved(num_tokens=num_tokens, before=before):
            found = [manifest for manifest in kept_manifests(stack) if manifest.cache_ref not in before]
            return [list(manifest.token_ids) for manifest in found if len(manifest.token_ids) == num_tokens - 1]

        (ids,) = wait_until(saved, what=f"{num_tokens - 1} tokens of {client.name} are kept", is_so=bool)
        prompt = ids[: answered.prompt_tokens]
        shared = {reference: common(list(known), prompt) for reference, known in before.items()}
        most = max(shared.values(), default=0)
        extends = any(length == most == len(before[reference]) for reference, length in shared.items())
        yield {
            "prompt": answered.prompt_tokens,
            "computed": answered.prompt_tokens - answered.cached_tokens,
            "cached": answered.cached_tokens,
            "new": answered.prompt_tokens - most,
            "more": 1 if extends else 1 + BLOCK_TOKENS,
            "text": answered.text,
        }
        before = {manifest.cache_ref: manifest.token_ids for manifest in kept_manifests(stack)}
