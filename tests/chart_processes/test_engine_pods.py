"""Engine pods that are replaced: their KV comes back with their disk, or from the store, or is computed; two models."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.chart.rendering import Release
from tests.kit.rendered.cluster import Cluster, running_cluster
from tests.kit.rendered.front import Front
from tests.kit.rendered.installation import install
from tests.kit.rendered.scenario import scenario
from tests.kit.tiny_model import VOCABULARY, make_tiny_model
from tests.kit.until import wait_until

pytestmark = pytest.mark.timeout(1200)
MAX_MODEL_LEN = 2048
NUM_PODS, NUM_CONTEXTS, NUM_CLIENTS = 3, 12, 3
PAUSE_S = 1.0
"""Of a client between two turns: two cores also start an engine meanwhile."""
WARM_SHARE = 0.95
"""Of the turns whose context some pod has, those that are not computed, through a rolling update."""


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a short name: the path of a Unix socket has room for 107 bytes."""
    return tmp_path_factory.mktemp("r")


@contextmanager
def release_of(folder: Path, more: dict[str, Any], **claims: Path) -> Iterator[tuple[Cluster, Front]]:
    """Run a release over tiny models, and give a client of it."""
    models = folder / "models"
    for number, name in enumerate(("smollm2", "other")):
        make_tiny_model(models / name, seed=number, max_model_len=MAX_MODEL_LEN)
    made = scenario(models, tls=False, more={"engine": {"maxModelLen": MAX_MODEL_LEN}} | more, claims=claims)
    with running_cluster(install(Release(made.values)), made.given, folder) as cluster:
        cluster.start()
        front = Front(cluster, b"")
        with front.http:
            front.wait_served()
            yield cluster, front


def words(seed: int) -> list[int]:
    """Return 300 token ids of a tiny model's vocabulary."""
    return random.Random(seed).choices(range(VOCABULARY - 100), k=300)


def served(front: Front, *asked: Any) -> dict[str, Any]:
    """Ask until a pod of the model is seen by the gateway, and by Envoy (docs/operations/limits.md, Several models)."""
    answer = wait_until(
        lambda: front.ask(*asked),
        is_so=lambda answer: answer.status_code == 200 or answer.json()["error"]["code"] != "no_ready_endpoint",
        what="the model is served",
        deadline_s=120,
    )
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize(
    ("kind", "outlives"),
    [("pvc", True), ("hostPath", True), ("ephemeral", False)],
    ids=["pvc", "hostPath", "ephemeral"],
)
def test_two_models_of_one_release_and_what_is_left_of_kv_when_a_pod_comes_back(folder, kind, outlives):
    (folder / "node").mkdir()
    storage = {"type": kind, **({"hostPath": str(folder / "node")} if kind == "hostPath" else {})}
    models = {name: {"model": f"/models/{name}", "servedModelName": name} for name in ("smollm2", "other")}
    more = {"engine": {"model": "", "maxModelLen": MAX_MODEL_LEN}, "models": models, "sidecar": {"storage": storage}}
    with release_of(folder, more) as (cluster, front):
        prompt = words(3)
        contexts = {}
        for name in models:
            answer = served(front, "POST", "/v1/context", {"model": name, "prompt": prompt, "max_tokens": 1})
            contexts[name] = answer["session_id"]
        for session_id in contexts.values():
            front.wait_sealed(session_id)

        sources = {}
        for name, session_id in contexts.items():
            (old,) = cluster.of(f"engine-{name}")
            if outlives:
                cluster.recreate(old)
            else:
                assert cluster.replace(old) == []
            front.wait_served()
            asked = {"model": name, "prompt": " and", "session_id": session_id, "max_tokens": 4}
            sources[name] = served(front, "POST", "/v1/completions", asked)["usage"]["context"]["source"]

    # A pod that goes with its disk has a new one beside it, which may fetch the KV; there is nobody else to ask later.
    assert set(sources.values()) <= ({"disk"} if outlives else {"peer", "recompute"})


def test_a_rolling_update_of_three_pods_under_load_fails_nothing_and_leaves_contexts_warm(folder):
    store = {
        "settings": {"storeUrl": "file:///store"},
        "extraVolumes": [{"name": "store", "persistentVolumeClaim": {"claimName": "store"}}],
        "extraVolumeMounts": [{"name": "store", "mountPath": "/store"}],
    }
    more = {"engine": {"replicas": NUM_PODS, "maxModelLen": MAX_MODEL_LEN}, "sidecar": store}
    with release_of(folder, more, store=folder / "store") as (cluster, front):
        contexts = [
            front.create(prompt=words(10 + number), max_tokens=1)["session_id"] for number in range(NUM_CONTEXTS)
        ]
        for session_id in contexts:
            front.wait_sealed(session_id)
        seen: Counter[str] = Counter()
        failed: list[str] = []
        stop = threading.Event()

        def ask(client: int) -> None:
            chosen = random.Random(client)
            mine = contexts[client::NUM_CLIENTS]
            while not stop.is_set():
                asked = {"model": "smollm2", "prompt": [chosen.randrange(VOCABULARY - 100)], "max_tokens": 1}
                answer = front.ask("POST", "/v1/completions", asked | {"session_id": chosen.choice(mine)})
                if answer.status_code != 200:
                    failed.append(answer.text)
                    continue
                usage = answer.json()["usage"]["context"]
                warm = usage["cached_tokens"] >= 0.9 * usage["context_tokens"]
                seen[usage["source"] if warm else "recompute"] += 1
                stop.wait(PAUSE_S)

        with ThreadPoolExecutor(NUM_CLIENTS) as pool:
            clients = [pool.submit(ask, number) for number in range(NUM_CLIENTS)]
            try:
                wait_until(lambda: seen.total() >= NUM_CONTEXTS, what="there is traffic", deadline_s=300)
                old = cluster.of("engine")
                killed = [name for pod in old for name in cluster.replace(pod)]
                since = seen.total()
                wait_until(lambda: seen.total() >= since + 3 * NUM_CONTEXTS, what="traffic goes on", deadline_s=300)
            finally:
                stop.set()
        for client in clients:
            client.result()
        new = cluster.of("engine")

    print(f"{seen.total()} turns: {dict(seen)}")
    assert failed == []
    assert killed == []
    assert len(new) == NUM_PODS
    assert not set(new) & set(old)
    assert seen["recompute"] <= (1 - WARM_SHARE) * seen.total()
