"""What is kept of plain requests: listed over all pods, shown, deleted everywhere; no store is asked."""

import pytest

from contextcache.names import new_cache_ref
from tests.kit.gateway_parts import OTHER_KEY, manifest_of


@pytest.fixture(autouse=True)
def no_manager(parts):
    """Nothing here asks one."""
    parts.directory.down = True


def keep(parts, pod, group, **fields):
    parts.sidecars[pod].keep(manifest_of(group, cache_ref=new_cache_ref(), **fields))


async def listed(client, **query):
    answer = await client.get("/v1/context", params={"kind": "kept", **query})
    assert answer.status_code == 200
    return answer.json()


async def test_a_conversation_on_two_pods_is_one_with_the_bytes_of_both(parts, client):
    keep(parts, "pod-a", "kept_1", size_bytes=100)
    keep(parts, "pod-b", "kept_1", size_bytes=50)
    keep(parts, "pod-b", "kept_2", size_bytes=7)
    keep(parts, "pod-b", "kept_3", tenant="other")

    page = await listed(client)
    shown = {one["id"]: one for one in page["data"]}

    assert set(shown) == {"kept_1", "kept_2"}
    assert shown["kept_1"] == {
        "object": "kept",
        "id": "kept_1",
        "tokens": 3,
        "bytes": 150,
        "last_used": None,
        "expires_at": 2_000_000_000,
        "pods": ["pod-a", "pod-b"],
        "last_miss": None,
    }
    assert (page["has_more"], page["unreachable"]) == (False, [])
    assert (await client.get("/v1/context/kept_1")).json() == shown["kept_1"] | {"unreachable": []}
    assert parts.directory.calls == []


async def test_pages_follow_one_another_and_an_unknown_name_is_400(parts, client):
    for number in range(5):
        keep(parts, "pod-a", f"kept_{number}")
    seen, after = [], ""
    while True:
        page = await listed(client, limit=2, after=after)
        seen += [one["id"] for one in page["data"]]
        after = page["last_id"]
        if not page["has_more"]:
            break

    assert sorted(seen) == [f"kept_{number}" for number in range(5)]
    assert (await client.get("/v1/context", params={"kind": "kept", "after": "kept_x"})).status_code == 400
    assert (await client.get("/v1/context", params={"kind": "all"})).status_code == 400


async def test_a_delete_reaches_every_pod_and_says_which_it_did_not(parts, client):
    for pod in parts.sidecars:
        keep(parts, pod, "kept_1")
    parts.sidecars["pod-b"].down = True

    answer = await client.delete("/v1/context/kept_1")

    assert answer.json() == {"session_id": "kept_1", "status": "partial", "unreachable": ["pod-b"]}
    assert (await listed(client))["unreachable"] == ["pod-b"]
    assert (await client.get("/v1/context/kept_1")).status_code == 503
    assert (await client.delete("/v1/context/kept_1")).json()["status"] == "partial"
    parts.sidecars["pod-b"].down = False
    assert (await client.delete("/v1/context/kept_1")).json()["status"] == "success"
    assert (await client.delete("/v1/context/kept_1")).status_code == 404


async def test_another_tenant_s_is_as_if_there_were_none(parts, client):
    keep(parts, "pod-a", "kept_1")
    theirs = {"authorization": f"Bearer {OTHER_KEY}"}

    assert (await client.get("/v1/context/kept_1", headers=theirs)).status_code == 404
    assert (await client.delete("/v1/context/kept_1", headers=theirs)).status_code == 404
    assert (await client.get("/v1/context", params={"kind": "kept"}, headers=theirs)).json()["data"] == []
    assert (await client.get("/v1/context/kept_1")).status_code == 200
