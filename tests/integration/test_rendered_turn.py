"""The processes of a rendered release with a toy in vLLM's place: requests on their way through the turn process.

`tests/chart_processes` runs the same release with vLLM itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.chart.rendering import Release
from tests.kit.rendered import container, images
from tests.kit.rendered.cluster import Cluster, running_cluster
from tests.kit.rendered.front import READY_S, Front
from tests.kit.rendered.installation import install
from tests.kit.rendered.monitors import scraped
from tests.kit.rendered.scenario import MODEL, scenario
from tests.kit.rendered.toy_engine import TOY

pytestmark = pytest.mark.timeout(300)


def command_of(spec):
    """Return a container's command; vLLM's arguments go to the toy."""
    return [*TOY, *spec["args"]] if spec["name"] == "vllm" else images.command_of(spec)


class _Images:
    """The images of `tests.kit.rendered.images`, with a toy in vLLM's."""

    command_of = staticmethod(command_of)
    environment_of = staticmethod(images.environment_of)


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "tls"])
def world(request, tmp_path_factory) -> Iterator[tuple[Cluster, Front]]:
    """A running release, and a client of it."""
    folder: Path = tmp_path_factory.mktemp("r")  # short: the path of a Unix socket has room for 107 bytes
    scene = scenario(folder, tls=request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(container, "images", _Images)
        with running_cluster(install(Release(scene.values)), scene.given, folder) as cluster:
            cluster.start()
            front = Front(cluster, scene.front_ca)
            with front.http:
                front.wait_served()
                yield cluster, front


def turns_of(cluster: Cluster) -> int:
    """Return the number of turns that the pod's turn process has run."""
    (pod,) = cluster.of("engine")
    secure = "HTTPS" in str(pod["turn"].spec["livenessProbe"])
    url = f"http{'s' * secure}://{pod.address}:{pod.ports['turn']}/metrics"
    text = httpx.get(url, verify=False, timeout=READY_S).text
    return sum(
        int(float(number)) for number in re.findall(r"^contextcache_turn_turns_total\{.*\} (\S+)$", text, re.MULTILINE)
    )


def test_a_context_runs_in_the_turn_process_and_its_metrics_are_scraped(world):
    cluster, front = world
    before = turns_of(cluster)
    session_id = front.create(prompt="Say this is a test", ttl=600)["session_id"]
    answer = front.complete(prompt=" And again", session_id=session_id)
    events = front.stream(prompt=" And once more", session_id=session_id)
    front.delete(session_id)
    (pod,) = cluster.of("engine")

    assert answer["usage"]["context"]["committed"]
    assert events[-1]["usage"]["context"]["committed"]
    assert turns_of(cluster) - before == 3
    wanted = {"contextcache_turn_turns_total", "contextcache_sidecar_bytes", "vllm:num_requests_running"}
    assert wanted <= scraped(cluster)[pod.name]


def test_a_plain_request_reaches_vllm(world):
    cluster, front = world
    before = turns_of(cluster)

    assert front.complete(prompt="Hi")["choices"]
    assert turns_of(cluster) == before


def test_every_probe_of_the_pod_follows_its_own_container(world):
    """Seen failing: a dead vLLM restarted the turn process, whose answers outlive it."""
    cluster, front = world
    (pod,) = cluster.of("engine")
    vllm, turn = pod["vllm"], pod["turn"]
    passed = {
        (one.name, kind): one.passes(kind) for one in (vllm, turn) for kind in ("startup", "liveness", "readiness")
    }
    vllm.kill()
    cluster.observe()
    unready = pod.ready
    alone = {kind: turn.passes(kind) for kind in ("startup", "liveness", "readiness")}
    refused = front.ask("POST", "/v1/context", {"model": MODEL, "prompt": "Hi"})
    pod.restart(vllm)
    cluster.wait_ready()
    front.wait_served()

    assert all(passed.values()), passed
    assert not unready
    assert alone == {"startup": True, "liveness": True, "readiness": False}
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_ready_endpoint")
    assert front.create(prompt="Hi")["session_id"]


def test_a_pod_is_replaced_and_none_of_its_containers_is_killed(world):
    cluster, front = world
    (old,) = cluster.of("engine")

    assert cluster.replace(old) == []
    front.wait_served()
    assert front.create(prompt="Hi")["session_id"]
