"""`GET /v1/deployment`: what an operator's key sees, and no other."""

from __future__ import annotations

import json

from tests.kit.fronts import code_of
from tests.kit.gateway_parts import KEY, OPERATOR_KEY
from tests.kit.turn_pod import MODEL, running_turn_pod
from tests.kit.until import until


async def test_an_operator_sees_pods_and_tenants_page_by_page_and_nobody_else_does(open_front, tmp_path, manager):
    async def seen(front, query="", key=OPERATOR_KEY):
        headers = {"authorization": f"Bearer {key}"}
        async with front.request("GET", f"/v1/deployment{query}", headers=headers) as answer:
            return (await code_of(answer)) if answer.status != 200 else json.loads(await answer.read())

    async with (
        running_turn_pod(tmp_path, manager_port=manager.port) as pod,
        open_front({"pod-a": pod}, manager_port=manager.port, tenant_burst=7) as front,
    ):
        first = await until(
            lambda: seen(front, "?limit=2"), is_so=lambda said: said["pods"][0]["state"] == "ready", what="the pod"
        )
        rest = await seen(front, f"?limit=2&after={first['last_tenant']}")
        last = await seen(front, "?after=zzz")
        refused = await seen(front, key=KEY)
        await manager.stop()
        without_manager = await seen(front)

    (pod_seen,) = first["pods"]
    assert (pod_seen["name"], pod_seen["models"]) == ("pod-a", [MODEL])
    assert first["limits"]["burst"] == 7
    assert [one["tenant"] for one in first["tenants"]] == ["demo", "operator"]
    assert (first["has_more"], first["last_tenant"]) == (True, "operator")
    assert ([one["tenant"] for one in rest["tenants"]], rest["has_more"]) == (["other"], False)
    assert (last["tenants"], last["has_more"], last["last_tenant"]) == ([], False, None)
    assert [(len(one["keys"]), one["num_keys"]) for one in without_manager["tenants"]] == [(1, 1)] * 3
    assert refused == (403, "operator_only")
