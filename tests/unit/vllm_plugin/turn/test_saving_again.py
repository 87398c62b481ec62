"""What a turn that commits nothing orders for the case that the context's KV is gone."""

import pytest

from contextcache.identity import verify_kv_transfer
from tests.kit.fake_vllm import encode
from tests.kit.turn_bench import SECRET


def order(pod):
    body = pod.engine.generations()[-1]
    return verify_kv_transfer(body["kv_transfer_params"]["context_cache"], SECRET)


async def created(pod, **body):
    answer = await pod.create(prompt="Hello", **body)
    assert answer.status == 200, answer.body
    return answer.json["session_id"]


@pytest.mark.parametrize(
    ("create", "turn"),
    [({"mode": "prefix"}, {}), ({}, {"context_commit": False})],
    ids=["mode-prefix", "context-commit-false"],
)
async def test_a_turn_that_commits_nothing_has_the_context_saved_again_if_it_is_lost(pod, create, turn):
    session_id = await created(pod, **create)
    named = order(pod).save

    await pod.ask(session_id, prompt=" more", **turn)

    assert (order(pod).load, order(pod).save) == ((named,), None)
    # The transcript: the prompt and the answer "!". Not " more", which is this turn's alone.
    assert order(pod).save_again_tokens == len(encode("Hello!"))


async def test_a_turn_that_leaves_the_context_early_brings_nothing_back(pod):
    """Its tokens would stand under the context's name and serve only the part they share."""
    session_id = await created(pod, mode="prefix")

    await pod.ask(session_id, prompt="Hello, but otherwise", context_mode="replay")

    assert order(pod).save_again_tokens == 0


async def test_turns_that_commit_name_what_they_save(pod):
    session_id = await created(pod)
    assert order(pod).save_again_tokens == 0

    await pod.ask(session_id, prompt=" more")

    assert order(pod).save_again_tokens == 0
    assert order(pod).save is not None
