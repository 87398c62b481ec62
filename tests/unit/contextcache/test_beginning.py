"""What should meet on one pod, without keeping a word of it."""

import json

import pytest

from contextcache.beginning import prompt_affinity
from contextcache.claim import read_claims


def affinity(tenant, body):
    return prompt_affinity(tenant, read_claims(json.dumps(body).encode()))


LONG = "You are a helpful assistant. " * 100


def test_prompts_that_begin_alike_are_alike():
    assert affinity("demo", {"prompt": LONG + "a"}) == affinity("demo", {"prompt": LONG + "b"})
    assert affinity("demo", {"prompt": "a"}) != affinity("demo", {"prompt": "b"})


def test_token_ids_that_begin_alike_are_alike():
    ids = list(range(300))

    assert affinity("demo", {"prompt": [*ids, 1]}) == affinity("demo", {"prompt": [*ids, 2]})
    assert affinity("demo", {"prompt": [1, 2]}) != affinity("demo", {"prompt": [1, 3]})


def test_conversations_with_the_same_first_message_are_alike():
    first = {"role": "system", "content": "Be brief."}
    other = {"content": "Be brief.", "role": "system"}
    long = [first, {"role": "user", "content": "Hello"}]

    assert affinity("demo", {"messages": long}) == affinity("demo", {"messages": [other]})


def test_tenants_and_models_keep_theirs_apart():
    found = {
        affinity("demo", {"prompt": "a", "model": "m"}),
        affinity("demo", {"prompt": "a", "model": "n"}),
        affinity("other", {"prompt": "a", "model": "m"}),
    }

    assert len(found) == 3


@pytest.mark.parametrize("body", [{}, {"prompt": ""}, {"prompt": 7}, {"messages": []}, {"messages": "x"}])
def test_a_body_without_a_beginning_has_no_wish(body):
    assert affinity("demo", body) == ""


def test_nothing_of_the_text_is_kept():
    assert len(affinity("demo", {"prompt": "secret \ud800"})) == 32


def test_a_cache_mark_that_moves_keeps_a_conversation_on_its_pod():
    text = [{"type": "text", "text": "Be brief."}]
    marked = [text[0] | {"cache_control": {"type": "ephemeral"}}]

    assert affinity("demo", {"messages": [{"role": "system", "content": marked}]}) == affinity(
        "demo", {"messages": [{"role": "system", "content": text}]}
    )
