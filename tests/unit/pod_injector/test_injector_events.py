"""Pods as others' charts make them, and what the owner of one that is left alone is told, once, beside the answer."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry

from contextcache.kubernetes.objects import (
    EVENTS,
    REPLICA_SETS,
    KubernetesExists,
    KubernetesForbidden,
    KubernetesNotFound,
)
from pod_injector.events import Announcer, skip_event
from pod_injector.metrics import InjectorMetrics
from pod_injector.not_injected import NotInjected, Reason
from pod_injector.review import review
from tests.unit.pod_injector.pods import make_parts, make_pod

THEIRS = Path(__file__).with_name("theirs")
OWNER = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "llama-7d9", "uid": "u-7", "controller": True}
EXC = NotInjected(Reason.PORT, "the engine listens on 8200")


def told(pod, **request):
    return skip_event({"namespace": "llm"} | request, pod, EXC)


def pod_of(*owners, **metadata):
    pod = make_pod()
    pod["metadata"] |= {"ownerReferences": list(owners)} | metadata
    return pod


@pytest.mark.parametrize(
    ("name", "changes", "outcome"),
    [
        ("production-stack", {}, "injected"),
        # `eval "exec vllm serve … $@"`: what the shell makes of it a second time is not to be seen in its text.
        ("kserve-llminferenceservice", {}, "shell-script"),
        ("llm-d-decode", {}, "kv-connector"),
        # Behind its routing proxy vLLM has another port, and without Nixl that is what is left.
        ("llm-d-decode", {"kv": False}, "port"),
    ],
)
def test_a_pod_as_others_make_it_is_injected_or_left_alone_for_a_reason(name, changes, outcome):
    spec = yaml.safe_load((THEIRS / f"{name}.yaml").read_text())
    if "kv" in changes:
        spec["containers"][0]["args"] = spec["containers"][0]["args"][:-2]
    pod = {**pod_of(OWNER), "spec": spec}
    body = {"uid": "u", "kind": {"kind": "Pod"}, "operation": "CREATE", "object": pod, "namespace": "llm"}
    verdict = review({"kind": "AdmissionReview", "request": body}, make_parts())

    assert verdict.outcome == outcome
    assert (verdict.event is not None) is (outcome != "injected")


def test_what_made_the_pod_is_told_and_a_crowd_of_pods_is_one_event():
    first, second = told(pod_of(OWNER)), told(pod_of(OWNER, generateName="another-"))

    assert first == second
    assert first.body["involvedObject"] == {
        "apiVersion": "apps/v1",
        "kind": "ReplicaSet",
        "name": "llama-7d9",
        "uid": "u-7",
        "namespace": "llm",
    }
    assert "port" in first.body["message"]
    assert first.body["metadata"]["name"].startswith("llama-7d9.")


def test_another_reason_or_another_owner_is_another_event():
    names = {
        told(pod_of(OWNER)).body["metadata"]["name"],
        told(pod_of(OWNER | {"uid": "u-8"})).body["metadata"]["name"],
        skip_event({"namespace": "llm"}, pod_of(OWNER), NotInjected(Reason.USER, "")).body["metadata"]["name"],
    }

    assert len(names) == 3


def test_a_pod_that_nothing_made_is_told_of_itself_by_its_name():
    assert told(pod_of(name="alone")).body["involvedObject"]["name"] == "alone"


@pytest.mark.parametrize(
    ("pod", "request_"),
    [
        (pod_of(OWNER), {"dryRun": True}),
        (pod_of(), {}),
        (pod_of("odd", name=7), {}),
        (pod_of(OWNER), {"namespace": ""}),
    ],
)
def test_a_dry_run_and_a_pod_without_any_name_are_nobodys_event(pod, request_):
    assert told(pod, **request_) is None


def test_a_name_of_any_length_is_an_event_s_name():
    name = told(pod_of(OWNER | {"name": "a" * 199 + ".b" * 27})).body["metadata"]["name"]

    assert len(name) <= 253
    assert ".." not in name


class Writer:
    """Takes events, or refuses them; has the ReplicaSets that it is given."""

    def __init__(self, *refusals, replica_sets=()):
        self.refusals, self.written = list(refusals), []
        self.replica_sets = {one["metadata"]["name"]: one for one in replica_sets}

    async def get(self, resource, namespace, name):
        assert (resource, namespace) == (REPLICA_SETS, "llm")
        if name not in self.replica_sets:
            raise KubernetesNotFound("404")
        return self.replica_sets[name]

    async def create(self, resource, namespace, body):
        if self.refusals:
            raise self.refusals.pop(0)
        self.written.append((resource, namespace, body))


DEPLOYMENT = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "llama", "uid": "u-1", "controller": True}


def replica_set(name="llama-7d9", uid="u-7", owners=(DEPLOYMENT,)):
    return {"metadata": {"name": name, "uid": uid, "ownerReferences": list(owners)}}


async def written_of(writer, *pods):
    announcer = Announcer(writer, InjectorMetrics(CollectorRegistry()))
    for pod in pods:
        announcer.tell(told(pod))
    task = asyncio.create_task(announcer.run())
    while len(writer.written) < len(pods):
        await asyncio.sleep(0)
    task.cancel()
    return [body for _, _, body in writer.written]


async def test_the_deployment_is_told_and_all_its_replica_sets_are_one_event():
    """Seen failing: the Event was the ReplicaSet's, and `kubectl describe deployment` showed nothing."""
    writer = Writer(replica_sets=[replica_set(), replica_set("llama-8e0", "u-8")])
    other = OWNER | {"name": "llama-8e0", "uid": "u-8"}
    first, second = await written_of(writer, pod_of(OWNER), pod_of(other))

    assert first["involvedObject"] == {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "name": "llama",
        "uid": "u-1",
        "namespace": "llm",
    }
    assert first["metadata"]["name"] == second["metadata"]["name"]


@pytest.mark.parametrize(
    "replica_sets",
    [
        [],
        [replica_set(owners=())],
        [replica_set(owners=[DEPLOYMENT | {"controller": False}])],
        [replica_set(uid="another-of-this-name")],
        [{"metadata": {"name": "llama-7d9", "uid": "u-7", "ownerReferences": ["odd"]}}],
    ],
)
async def test_where_the_deployment_cannot_be_told_its_replica_set_is(replica_sets):
    (body,) = await written_of(Writer(replica_sets=replica_sets), pod_of(OWNER))

    assert body["involvedObject"]["name"] == "llama-7d9"


async def test_nothing_is_read_for_a_stateful_set():
    owner = OWNER | {"kind": "StatefulSet", "name": "llama"}
    (body,) = await written_of(Writer(replica_sets=[replica_set("llama")]), pod_of(owner))

    assert body["involvedObject"]["kind"] == "StatefulSet"


async def test_what_cannot_be_written_is_counted_and_the_next_one_is_written():
    writer = Writer(KubernetesExists("409"), KubernetesForbidden("403"))
    metrics = InjectorMetrics(CollectorRegistry())
    announcer = Announcer(writer, metrics, now=lambda: datetime(2026, 11, 25, tzinfo=UTC))
    task = asyncio.create_task(announcer.run())
    for _ in range(3):
        announcer.tell(told(pod_of(OWNER)))
    while not writer.written:
        await asyncio.sleep(0)
    task.cancel()

    (resource, namespace, body) = writer.written[0]
    assert (resource, namespace, body["firstTimestamp"]) == (EVENTS, "llm", "2026-11-25T00:00:00Z")
    assert {name: metrics.events.labels(name)._value.get() for name in ("known", "failed")} == {"known": 1, "failed": 1}


def test_more_than_can_wait_are_dropped_and_the_review_does_not_wait():
    metrics = InjectorMetrics(CollectorRegistry())
    announcer = Announcer(Writer(), metrics)
    for _ in range(200):
        announcer.tell(told(pod_of(OWNER)))

    assert metrics.events.labels("dropped")._value.get() == 200 - 128
