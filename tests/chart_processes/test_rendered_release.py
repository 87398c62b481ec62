"""The processes run from the rendered manifests: commands, arguments, environment and files as the chart gives them.

tests/kit/rendered/substitutions.py lists what has to differ on one machine.
"""

from __future__ import annotations

import json
import re
import socket
import ssl
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from tests.chart.manifests import COMPONENT
from tests.kit.rendered.cluster import Cluster
from tests.kit.rendered.front import READY_S, Front
from tests.kit.rendered.monitors import scraped
from tests.kit.rendered.notes import run_notes
from tests.kit.rendered.scenario import FRONT_NAME, MODEL, PARTS_NAME
from tests.kit.until import wait_until
from tests.kit.vllm_answers import ids_of_length

pytestmark = pytest.mark.timeout(900)
PROMPT = "Say this is a test"
NUM_ANSWERS = 12
"""What traffic must get through before, during and after a rollout."""

PORTS_WITHOUT_TLS = {"metrics", "kv-metrics", "redis"}


class _RenderedRelease:
    """Told of each release; the classes below say of which."""

    tls: bool

    def test_every_probe_of_every_container_succeeds(self, cluster):
        failed = [
            (pod.name, one.name, kind)
            for pod in cluster.pods
            for one in pod.running
            for kind in ("startup", "liveness", "readiness")
            if not one.passes(kind) and not one.passes(kind)
        ]

        assert failed == []
        assert {one.name for pod in cluster.pods for one in pod.running} == {
            "attendant",
            "context-manager",
            "envoy",
            "gateway",
            "kv-sidecar",
            "turn",
            "valkey",
            "vllm",
        }

    def test_gateways_serve_while_the_engine_loads_and_the_engine_is_ready_when_it_serves(self, cluster):
        before = [seen for seen in cluster.history if not seen["engine"].ready]

        assert any(seen["gateway"].ready for seen in before)
        assert any(seen["engine"].alive and not seen["engine"].passes for seen in before)

    def test_the_story_create_ask_append_stream_chat_delete(self, cluster, front):
        created = front.create(prompt=PROMPT, ttl=3600)
        session_id = created["session_id"]
        asked = front.complete(prompt=PROMPT, session_id=session_id)
        appended = front.complete(prompt=" And once more", session_id=session_id)
        streamed = front.stream(prompt=" and on", session_id=session_id)
        chat_id = front.create(messages=[{"role": "user", "content": "My name is Ada."}])["session_id"]
        talked = front.chat(messages=[{"role": "user", "content": "And yours?"}], session_id=chat_id)
        generations = [front.read(each)["generation"] for each in (session_id, chat_id)]
        front.delete_all()
        gone = [
            front.ask("GET", f"/v1/context/{session_id}"),
            front.ask("DELETE", f"/v1/context/{session_id}"),
            front.ask("POST", "/v1/completions", {"model": MODEL, "prompt": PROMPT, "session_id": session_id}),
        ]

        assert created["usage"]["prompt_tokens"] == 5
        assert asked["usage"]["prompt_tokens"] == 1
        assert asked["usage"]["context"]["source"] != "recompute"
        assert asked["choices"][0]["text"] == created["choices"][0]["text"]
        for answer in (appended, streamed[-1], talked):
            assert answer["usage"]["context"]["committed"]
            assert answer["usage"]["context"]["source"] != "recompute"
        # Creating is the first; the same prompt again adds nothing that was not there.
        assert generations == [4, 2]
        assert [(answer.status_code, answer.json()["error"]["code"]) for answer in gone] == [
            (404, "context_not_found")
        ] * 3
        assert stored_bytes(cluster) == 0

    def test_a_rollout_of_the_gateways_fails_no_request(self, cluster, front):
        assert_a_rollout_fails_no_request(cluster, front, "gateway")

    def test_helm_test_passes(self, cluster, front):
        pod = cluster.test_pod()
        status = pod.run(READY_S)
        said = pod.containers[0].last_words()

        assert status == 0, said
        assert "hit: " in said

    def test_what_pod_monitors_scrape_is_there(self, cluster, front):
        session_id = front.create(prompt=PROMPT)["session_id"]
        front.complete(prompt=PROMPT, session_id=session_id)
        front.delete(session_id)
        found = scraped(cluster)

        metrics = {
            "context-manager": {"contextcache_manager_sessions"},
            "engine": {"contextcache_sidecar_bytes", "contextcache_turn_turns_total", "vllm:num_requests_running"},
            "envoy": {"envoy_http_downstream_rq_total"},
            "gateway": {"contextcache_gateway_ready_state"},
        }
        for component, wanted in metrics.items():
            for pod in cluster.of(component):
                assert wanted <= found[pod.name], pod.name

    def test_the_notes_commands_do_what_they_say(self, cluster, scene, front, tmp_path):
        created, asked, deleted = run_notes(cluster.made, front, scene.front_ca, tmp_path)

        assert created["usage"]["prompt_tokens"] == 5
        assert asked["usage"]["prompt_tokens"] == 1
        assert deleted["status"] == "success"

    def test_containers_with_a_read_only_root_write_to_mounted_volumes_only(self, cluster):
        strays = {
            (one.name, path)
            for pod in cluster.pods
            for one in pod.running
            if one.spec["securityContext"]["readOnlyRootFilesystem"]
            for path in one.stray_files()
        }

        assert strays == set()

    def test_no_log_shows_a_secret(self, cluster, front):
        secrets = {
            front.key,
            cluster.made.secret("-signing", "secret"),
            cluster.made.secret("-valkey", "password"),
        }
        shown = {
            (one.name, secret[:3])
            for pod in cluster.pods
            for one in pod.running
            for secret in secrets
            if secret in one.log.read_text(errors="replace")
        }

        assert shown == set()


class TestPlain(_RenderedRelease):
    """Without TLS."""

    tls = False

    def test_after_a_kill_of_vllm_and_sidecar_the_next_turn_is_restored_from_disk(self, cluster, front):
        (pod,) = cluster.of("engine")
        prompt = ids_of_length(600, seed=7)
        first = front.create(prompt=prompt)
        front.wait_sealed(first["session_id"])

        for name in ("vllm", "kv-sidecar"):
            pod[name].kill()
        cluster.observe()
        was_ready = pod.ready
        wait_until(lambda: front.ask("GET", "/readyz").status_code == 503, what="nobody is ready", deadline_s=READY_S)
        refused = front.ask("POST", "/v1/completions", {"model": MODEL, "prompt": "Hi"})
        for name in ("kv-sidecar", "vllm"):
            pod.restart(pod[name])
        cluster.wait_ready()
        front.wait_served()
        answer = front.complete(prompt=" go on", session_id=first["session_id"])

        assert not was_ready
        assert all(gateway.ready for gateway in cluster.of("gateway"))
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_ready_endpoint")
        assert answer["usage"]["context"]["source"] == "disk"
        assert answer["usage"]["context"]["cached_tokens"] >= len(prompt)
        front.delete(first["session_id"])

    def test_an_envoy_that_is_replaced_cuts_no_answer(self, cluster, front):
        (old,) = [pod for pod in cluster.of("envoy") if pod.address == front.address.rpartition(":")[0]]
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(front.stream, prompt="one two three", max_tokens=1500, ignore_eos=True)
            killed = cluster.replace(old)
            events = answer.result()
        [drained] = [line for line in old["attendant"].log.read_text().splitlines() if "envoy draining" in line]

        assert json.loads(drained)["active_requests"] >= 1
        assert events[-1]["choices"][0]["finish_reason"] == "length"
        assert killed == []

    def test_a_rollout_of_the_managers_fails_no_request(self, cluster, front):
        assert_a_rollout_fails_no_request(cluster, front, "context-manager")


class TestMutualTls(_RenderedRelease):
    """Mutual TLS between the parts, HTTPS to vLLM and for clients."""

    tls = True

    def test_every_port_shows_a_certificate_but_those_of_probes_metrics_and_valkey(self, cluster, scene, front):
        signers = {PARTS_NAME: cluster.secret("parts-tls", "ca.crt"), FRONT_NAME: scene.front_ca.decode()}
        shown = {
            (pod.labels[COMPONENT], port): FRONT_NAME if port == "https" else PARTS_NAME
            for pod in cluster.pods
            for port in pod.ports.keys() - PORTS_WITHOUT_TLS
        }

        assert set(shown) == {
            ("context-manager", "grpc"),
            ("engine", "http"),
            ("engine", "kv-grpc"),
            ("engine", "turn"),
            ("envoy", "https"),
            ("gateway", "ext-proc"),
            ("gateway", "http"),
        }
        for (component, port), name in shown.items():
            for pod in cluster.of(component):
                assert shows_certificate(pod.address, pod.ports[port], signers[name], name), (pod.name, port)


def assert_a_rollout_fails_no_request(cluster: Cluster, front: Front, component: str) -> None:
    """Replace every pod of a component while clients ask."""
    old = cluster.of(component)
    with traffic(front) as counted:
        wait_until(lambda: counted.total() >= NUM_ANSWERS, what="there is traffic", deadline_s=READY_S)
        killed = [name for pod in old for name in cluster.replace(pod)]
        answered = counted.total()
        wait_until(lambda: counted.total() >= answered + NUM_ANSWERS, what="traffic goes on", deadline_s=READY_S)

    assert {what for what in counted if what[1] != 200} == set()
    assert {what[0] for what in counted} == {"turn", "stateless", "read"}
    assert killed == []
    assert not set(old) & set(cluster.of(component))


def shows_certificate(address: str, port: int, ca: str, name: str) -> bool:
    """Return whether a port shows a certificate that this CA signed for this name."""
    context = ssl.create_default_context(cadata=ca)
    try:
        with (
            socket.create_connection((address, port), timeout=READY_S) as plain,
            context.wrap_socket(plain, server_hostname=name),
        ):
            return True
    except (ssl.SSLError, ConnectionError):
        return False


def stored_bytes(cluster) -> int:
    """Return the bytes of blocks and manifests on disk and in the sidecar's memory tier."""
    (pod,) = cluster.of("engine")
    data = pod["kv-sidecar"].mounts["/var/lib/context-cache"]
    answer = httpx.get(f"http://{pod.address}:{pod.ports['kv-metrics']}/metrics", timeout=READY_S)
    (in_memory,) = re.findall(r'^contextcache_sidecar_bytes\{tier="host"\} (\S+)$', answer.text, re.MULTILINE)
    return size_bytes(*(data / kind for kind in ("blocks", "tails", "manifests"))) + int(float(in_memory))


def size_bytes(*folders: Path) -> int:
    found = 0
    for folder in folders:
        for file in folder.rglob("*"):
            with suppress(FileNotFoundError):
                found += file.stat().st_size if file.is_file() else 0
    return found


@contextmanager
def traffic(front: Front) -> Iterator[Counter]:
    """Three clients that ask without a pause until the block ends; counts kinds and statuses of answers."""
    counted: Counter = Counter()
    stop = threading.Event()
    session_id = front.create(prompt="one two three four five six seven", max_tokens=1)["session_id"]
    turn = {"model": MODEL, "prompt": " and", "max_tokens": 1, "session_id": session_id}
    calls = {
        "turn": ("POST", "/v1/completions", turn),
        "stateless": ("POST", "/v1/completions", {"model": MODEL, "prompt": "Hi", "max_tokens": 1}),
        "read": ("GET", f"/v1/context/{session_id}", None),
    }

    def ask(kind: str) -> None:
        while not stop.is_set():
            answer = front.ask(*calls[kind])
            counted[kind, answer.status_code if answer.status_code == 200 else answer.text] += 1
            stop.wait(0.1 if kind == "read" else 0)

    with ThreadPoolExecutor(len(calls)) as pool:
        clients = [pool.submit(ask, kind) for kind in calls]
        try:
            yield counted
        finally:
            stop.set()
    for client in clients:
        client.result()
    front.delete(session_id)
