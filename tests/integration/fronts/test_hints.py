"""Cache hints through both fronts, in each dialect, to a real sidecar: what was placed, and for whom it was not."""

from __future__ import annotations

import json

from contextcache.claim import TURN_PATHS
from tests.kit.tenant_world import MODEL, key_of, running_tenants

CHAT = [{"role": "user", "content": "Wait for the tool."}]
SAID = {
    "/v1/responses": {"input": CHAT},
    "/v1/messages": {"messages": CHAT, "max_tokens": 9},
    "/v1/chat/completions": {"messages": CHAT},
}


def hints(*names):
    return {"actions": [{"action_type": name} for name in names]}


async def test_a_turn_demotes_and_a_patch_prefetches_its_own_tenants_kv(front_kind, tmp_path):
    """Seen failing: a turn that asked for no placement at its seal left its KV in memory."""
    async with running_tenants(tmp_path, front=front_kind) as world:
        here = world.sidecar

        async def told(tenant, method, path, body):
            headers = {"authorization": f"Bearer {key_of(tenant)}", "content-type": "application/json"}
            sending = world.front.request(method, path, data=json.dumps(body).encode(), headers=headers)
            async with sending as answer:
                return answer.status, json.loads(await answer.read())

        def held(tenant):
            return here.blocks.memory_by_tenant().get(tenant, 0)

        for number, path in enumerate(["/v1/context", *sorted(TURN_PATHS)]):
            name = f"wait_{number}"
            named = {"session_id": name} | ({} if path == "/v1/context" else {"context_create": "if_missing"})
            body = {"model": MODEL, **named, **SAID.get(path, {"prompt": "Wait for the tool."})}
            status, other = await told("green", "POST", path, body)
            assert status == 200, other
            others_bytes = held("green")
            status, answer = await told("red", "POST", path, body | {"kv_hints": hints("demote", "share")})
            assert status == 200, answer
            demoted, shared = answer["usage"]["context"]["hints"]

            assert (demoted["outcome"], demoted["tier"]) == ("accepted", "disk")
            assert (shared["outcome"], shared["reason"]) == ("clipped", "no_store")
            assert held("red") == 0, path
            status, changed = await told("red", "PATCH", f"/v1/context/{name}", {"kv_hints": hints("prefetch")})
            await here.sidecar.threads.idle()
            assert (status, changed["hints"][0]["outcome"]) == (200, "accepted"), changed
            assert held("red") == changed["hints"][0]["bytes"] > 0
            status, refused = await told("blue", "PATCH", f"/v1/context/{name}", {"kv_hints": hints("demote")})
            assert (status, refused["error"]["code"]) == (404, "context_not_found")
            assert (held("red"), held("green")) == (changed["hints"][0]["bytes"], others_bytes)
            await told("red", "DELETE", f"/v1/context/{name}", {})  # the next context has the same beginning
