"""What a pod gets: golden patches, what its author set, what cannot be, and that a second look changes nothing."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import kubernetes_validate
import pytest

from pod_injector.engine_container import NotInjected, Reason
from pod_injector.payload_start.context_cache_start import ARGUMENTS_ENV
from pod_injector.pod_patch import injection_patch, skip_patch
from tests.unit.pod_injector.pods import ARGUMENTS, apply_patch, make_engine, make_parts, make_pod

GOLDEN = Path(__file__).with_name("golden")
PARTS = make_parts()
SHM_MOUNT = {"name": "shm", "mountPath": "/dev/shm"}
SHM_VOLUME = {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "2Gi"}}
ROOT_WITHOUT_RIGHTS = {"runAsUser": 0, "capabilities": {"drop": ["CAP_DAC_OVERRIDE"]}}
PODS = {
    "plain": make_pod(),
    "shell-and-lists": make_pod(
        make_engine(
            command=["sh", "-c"],
            args=["vllm serve m 2>&1 | tee /log"],
            env=[{"name": "PYTHONPATH", "value": "/theirs"}, {"name": "HF_HOME", "value": "/m"}],
            volumeMounts=[{"name": "models", "mountPath": "/m"}],
        ),
        {"name": "proxy", "image": "envoy:1", "args": ["-c", "/x"]},
        annotations={"team/x~y": "1"},
        initContainers=[{"name": "download", "image": "curl:1"}],
        volumes=[{"name": "models", "emptyDir": {}}],
        imagePullSecrets=[{"name": "theirs"}],
    ),
    "own-shared-memory-and-user": make_pod(
        make_engine(volumeMounts=[SHM_MOUNT], securityContext={"runAsUser": 2000, "runAsGroup": 3000}),
        volumes=[SHM_VOLUME],
    ),
}


def injected(pod, parts=PARTS):
    patch = injection_patch(pod, parts)
    assert patch is not None
    return apply_patch(pod, patch)


def engine_of(pod, name="vllm"):
    return next(container for container in pod["spec"]["containers"] if container["name"] == name)


def sidecar_of(pod):
    return next(container for container in pod["spec"]["initContainers"] if container["name"] == "kv-sidecar")


def ours_of(pod):
    """Return the containers that the injector has added."""
    named = {"context-cache-payload", "kv-sidecar", "turn"}
    return [one for one in (*pod["spec"]["initContainers"], *pod["spec"]["containers"]) if one["name"] in named]


def arguments_of(pod):
    """Return the arguments that vLLM's process will add to its own."""
    [value] = [item["value"] for item in engine_of(pod)["env"] if item["name"] == ARGUMENTS_ENV]
    return json.loads(value)["arguments"]


def reason_of(pod, parts=PARTS):
    with pytest.raises(NotInjected) as refusal:
        injection_patch(pod, parts)
    return refusal.value.reason


@pytest.mark.parametrize("name", PODS)
def test_the_patch_of_a_pod_is_the_golden_one(name):
    golden = json.loads((GOLDEN / f"{name}.json").read_text())

    assert injection_patch(PODS[name], PARTS) == golden


@pytest.mark.parametrize("version", ["1.30", "1.32", "1.35", "1.37"])
@pytest.mark.parametrize("name", PODS)
def test_an_injected_pod_is_valid(name, version):
    kubernetes_validate.validate(injected(PODS[name]), version, strict=True)


@pytest.mark.parametrize("name", PODS)
def test_a_second_look_changes_nothing(name):
    assert injection_patch(injected(PODS[name]), PARTS) is None


def test_the_pod_that_is_looked_at_is_not_changed():
    pod = copy.deepcopy(PODS["shell-and-lists"])
    injection_patch(pod, PARTS)

    assert pod == PODS["shell-and-lists"]


def test_payload_and_sidecar_come_before_the_pods_own_init_containers():
    names = [container["name"] for container in injected(PODS["shell-and-lists"])["spec"]["initContainers"]]

    assert names == ["context-cache-payload", "kv-sidecar", "download"]


def test_the_turn_process_is_the_last_container_and_no_init_container():
    """A native sidecar would get SIGTERM after vLLM has ended, too late to refuse turns."""
    after = injected(PODS["shell-and-lists"])["spec"]

    assert [container["name"] for container in after["containers"]] == ["vllm", "proxy", "turn"]
    assert "turn" not in [container["name"] for container in after["initContainers"]]


@pytest.mark.parametrize(
    ("hook", "expected"),
    [
        ({"preStop": {"sleep": {"seconds": 7}}}, {"preStop": {"sleep": {"seconds": 7}}}),
        ({"preStop": {"exec": {"command": ["sleep", "7"]}}}, None),
        ({"postStart": {"sleep": {"seconds": 7}}}, None),
        (None, None),
    ],
)
def test_the_turn_process_hears_of_its_end_together_with_vllm(hook, expected):
    """Seen failing: the turn process refused turns while vLLM's hook still slept."""
    after = injected(make_pod(make_engine(lifecycle=hook)))

    assert engine_of(after, "turn").get("lifecycle") == expected


def test_the_pod_is_found_by_its_releases_service_and_says_that_it_was_injected():
    metadata = injected(make_pod())["metadata"]

    assert metadata["labels"]["context-cache.io/engines"] == "cc-context-cache"
    assert metadata["labels"]["app"] == "llama"
    assert metadata["annotations"] == {"context-cache.io/injected": "0.1.0"}


def test_an_annotation_copied_from_a_running_pod_does_not_stand_in_for_the_sidecar():
    pod = make_pod(annotations={"context-cache.io/injected": "0.0.9"})

    assert sidecar_of(injected(pod))["name"] == "kv-sidecar"


@pytest.mark.parametrize("labels", [{}, {"context-cache.io/inject": "false"}])
def test_who_did_not_ask_is_left_alone(labels):
    pod = make_pod()
    pod["metadata"]["labels"] = labels

    assert reason_of(pod) is Reason.OPTED_OUT


def test_the_engine_is_the_container_with_vllm_and_no_other_is_touched():
    proxy = {"name": "proxy", "image": "envoy:1", "args": ["-c", "/x"]}
    after = injected(make_pod(proxy, make_engine()))

    assert engine_of(after, "proxy") == proxy
    assert arguments_of(after) == list(ARGUMENTS)


def test_of_two_engines_the_annotation_says_which():
    pods = [make_engine(name="a"), make_engine(name="b")]

    assert reason_of(make_pod(*pods)) is Reason.SEVERAL_VLLM_CONTAINERS
    after = injected(make_pod(*pods, annotations={"context-cache.io/container": "b"}))
    assert engine_of(after, "a") == pods[0]
    assert engine_of(after, "b") != pods[1]
    assert reason_of(make_pod(*pods, annotations={"context-cache.io/container": "c"})) is Reason.NO_VLLM_CONTAINER


@pytest.mark.parametrize(
    ("pod", "reason"),
    [
        (make_pod(hostNetwork=True), Reason.HOST_NETWORK),
        (make_pod(os={"name": "windows"}), Reason.WINDOWS),
        (make_pod({"name": "web", "image": "nginx:1"}), Reason.NO_VLLM_CONTAINER),
        (make_pod(make_engine(args=["m", "--port", "9000"])), Reason.PORT),
        (make_pod(initContainers=[{"name": "kv-sidecar", "image": "x"}]), Reason.NAME_TAKEN),
        (make_pod(make_engine(), {"name": "turn", "image": "x"}), Reason.NAME_TAKEN),
        (make_pod(volumes=[{"name": "context-cache-kv-run", "emptyDir": {}}]), Reason.NAME_TAKEN),
        (make_pod(make_engine(), {"name": "x", "image": "x", "ports": [{"containerPort": 50061}]}), Reason.NAME_TAKEN),
        (make_pod(make_engine(), {"name": "x", "image": "x", "ports": [{"containerPort": 8010}]}), Reason.NAME_TAKEN),
        (make_pod(make_engine(volumeMounts=[{"name": "x", "mountPath": "/run/context-cache/"}])), Reason.NAME_TAKEN),
        (make_pod(make_engine(env=[{"name": "PYTHONPATH", "valueFrom": {}}])), Reason.NAME_TAKEN),
        (make_pod(make_engine(image="vllm/vllm-openai:v0.28.1")), Reason.VLLM_VERSION),
        (make_pod(make_engine(securityContext={"runAsNonRoot": True})), Reason.USER),
        (make_pod(make_engine(securityContext={"capabilities": {"drop": ["ALL"]}})), Reason.USER),
        (make_pod(make_engine(securityContext=ROOT_WITHOUT_RIGHTS)), Reason.USER),
    ],
)
def test_a_pod_that_cannot_be_injected_has_a_reason(pod, reason):
    assert reason_of(pod) is reason


RUST = "VLLM_USE_RUST_FRONTEND"


@pytest.mark.parametrize(
    "changes",
    [
        *({"env": [{"name": RUST, "value": value}]} for value in ("1", " 1 ", "01", "2", "-1", "true", "True", "yes")),
        {"env": [{"name": RUST, "value": "0"}, {"name": RUST, "value": "1"}]},
    ],
)
def test_an_engine_with_the_rust_front_end_is_left_alone(changes):
    """Seen failing: the pod was injected, and its chats would get prompts that nobody stored."""
    assert reason_of(make_pod(make_engine(**changes))) is Reason.RUST_FRONTEND


@pytest.mark.parametrize(
    "changes",
    [
        *({"env": [{"name": RUST, "value": value}]} for value in ("0", " 0 ", "00", "")),
        {"env": [{"name": RUST}]},
        {"env": [{"name": RUST, "value": "1"}, {"name": RUST, "value": "0"}]},
        {"env": [{"name": "VLLM_USE_RUST_BENCH", "value": "1"}]},
        {"env": [{"name": RUST, "value": "$(FROM_ELSEWHERE)"}]},
        {"env": [{"name": RUST, "valueFrom": {"configMapKeyRef": {"name": "vllm", "key": "rust"}}}]},
        {"envFrom": [{"configMapRef": {"name": "vllm"}}]},
        {"command": ["env", f"{RUST}=0", "vllm", "serve", "m"], "args": None},
    ],
)
def test_an_engine_whose_manifest_shows_no_rust_front_end_is_injected(changes):
    """A value from elsewhere is checked when vLLM starts."""
    assert sidecar_of(injected(make_pod(make_engine(**changes))))


def test_a_pod_of_another_release_is_left_to_it():
    pod = make_pod()
    pod["metadata"]["labels"]["context-cache.io/engines"] = "other"

    assert reason_of(pod) is Reason.OTHER_RELEASE


@pytest.mark.parametrize(
    "changes",
    [
        {"command": ["/start.sh"]},
        {"args": None},
        {"command": ["sh", "-c", 'eval "vllm serve m $EXTRA_ARGS $@"'], "args": ["--"]},
        {"args": ["m", "--config", "/c.yaml"]},
    ],
)
def test_the_command_line_stays_and_vllm_adds_the_arguments_itself(changes):
    """Seen failing: start scripts were left alone, and a script with `$EXTRA_ARGS` too."""
    engine = make_engine(**changes)
    after = injected(make_pod(engine))

    assert arguments_of(after) == list(ARGUMENTS)
    assert {key: engine_of(after).get(key) for key in ("command", "args")} == {
        key: engine.get(key) for key in ("command", "args")
    }


def test_kubernetes_replaces_nothing_in_the_arguments():
    after = injected(make_pod(), make_parts(arguments=("$(HOME)",)))

    assert '"$$(HOME)"' in next(item["value"] for item in engine_of(after)["env"] if item["name"] == ARGUMENTS_ENV)


@pytest.mark.parametrize("volume", [SHM_VOLUME, {"name": "shm", "hostPath": {"path": "/dev/shm"}}])
def test_an_own_shared_memory_stays_the_engines_alone(volume):
    after = injected(make_pod(make_engine(volumeMounts=[SHM_MOUNT]), volumes=[volume]))

    assert after["spec"]["volumes"][0] == volume
    assert engine_of(after)["volumeMounts"][0] == SHM_MOUNT
    assert sidecar_of(after) == sidecar_of(injected(make_pod()))


def test_where_the_engine_has_no_shared_memory_it_gets_none():
    after = injected(make_pod())

    assert "/dev/shm" not in {
        mount["mountPath"] for one in (engine_of(after), sidecar_of(after)) for mount in one["volumeMounts"]
    }
    assert not any(volume.get("emptyDir", {}).get("medium") for volume in after["spec"]["volumes"])


def test_our_containers_are_the_engines_user_where_that_is_known():
    """The turn process and vLLM open sockets that are files of the sidecar."""
    contexts = [one["securityContext"] for one in ours_of(injected(PODS["own-shared-memory-and-user"]))]

    assert [(found["runAsUser"], found["runAsGroup"], found["runAsNonRoot"]) for found in contexts] == [
        (2000, 3000, True)
    ] * 3


def test_beside_an_engine_that_is_root_the_sidecar_is_not_and_their_files_share_a_group():
    after = injected(make_pod(make_engine(securityContext={"runAsUser": 0})))

    assert sidecar_of(after)["securityContext"]["runAsUser"] == 65532
    assert after["spec"]["securityContext"] == {"supplementalGroups": [65532]}


def test_the_groups_of_the_pods_own_volumes_stay():
    after = injected(make_pod(securityContext={"fsGroup": 7, "supplementalGroups": [8]}))

    assert after["spec"]["securityContext"] == {"fsGroup": 7, "supplementalGroups": [8, 65532]}


def test_a_claim_for_blocks_needs_a_group_that_may_write_it():
    claim = {"volumeClaimTemplate": {"spec": {"accessModes": ["ReadWriteOnce"]}}}
    parts = make_parts(volumes=[{"name": "kv-blocks", "ephemeral": claim}], mounts=[])

    assert reason_of(make_pod(), parts) is Reason.FS_GROUP
    assert injection_patch(make_pod(securityContext={"fsGroup": 7}), parts)


def test_secrets_can_be_read_in_a_pod_without_a_group_of_its_own():
    volumes = {volume["name"]: volume for volume in injected(make_pod())["spec"]["volumes"]}

    assert volumes["context-cache-signing"]["secret"]["defaultMode"] == 0o444


def test_the_authors_env_stays_and_their_python_path_follows_ours():
    """A template may have our variable, copied from a pod that an older release has injected."""
    theirs = [{"name": "PYTHONPATH", "value": "/theirs"}, {"name": "HF_HOME", "value": "/m"}]
    after = injected(make_pod(make_engine(env=[*theirs, {"name": ARGUMENTS_ENV, "value": "{}"}])))

    assert engine_of(after)["env"] == [
        {"name": "PYTHONPATH", "value": "/payload/start:/theirs"},
        {"name": "HF_HOME", "value": "/m"},
        {"name": ARGUMENTS_ENV, "value": json.dumps({"arguments": ARGUMENTS, "port": 8000, "https": False})},
    ]


def test_probes_follow_where_the_release_serves_https():
    probe = {"httpGet": {"path": "/health", "port": "web"}}
    other = {"httpGet": {"path": "/health", "port": 9999}}
    pod = make_pod(
        make_engine(ports=[{"name": "web", "containerPort": 8000}], readinessProbe=probe, livenessProbe=other)
    )
    after = engine_of(injected(pod, make_parts(https=True)))

    assert after["readinessProbe"]["httpGet"]["scheme"] == "HTTPS"
    assert after["livenessProbe"] == other
    assert engine_of(injected(pod))["readinessProbe"] == probe


def test_a_hook_follows_too_and_a_probe_that_is_a_program_is_not_guessed_at():
    """Seen injected: such a probe would have asked by HTTP, and had the engine killed for ever."""
    hook = {"preStop": {"httpGet": {"path": "/drain", "port": 8000}}}
    program = make_pod(make_engine(livenessProbe={"exec": {"command": ["curl", "-f", "http://localhost:8000/health"]}}))
    after = engine_of(injected(make_pod(make_engine(lifecycle=hook)), make_parts(https=True)))

    assert after["lifecycle"]["preStop"]["httpGet"]["scheme"] == "HTTPS"
    assert "livenessProbe" in engine_of(injected(program))
    with pytest.raises(NotInjected) as refusal:
        injected(program, make_parts(https=True))
    assert refusal.value.reason is Reason.SERVER


def test_a_pod_whose_resources_are_bounded_together_is_left_alone():
    """Seen injected: Kubernetes 1.34 then refuses every new pod of it."""
    with pytest.raises(NotInjected) as refusal:
        injected(make_pod(resources={"requests": {"cpu": "4", "memory": "16Gi"}}))

    assert refusal.value.reason is Reason.RESOURCES


def test_pull_secrets_are_added_once():
    pod = make_pod(imagePullSecrets=[{"name": "a"}])
    after = injected(pod, make_parts(image_pull_secrets=("a", "b")))

    assert after["spec"]["imagePullSecrets"] == [{"name": "a"}, {"name": "b"}]


def test_the_mark_of_a_pod_that_was_skipped_is_written_once_and_goes_with_the_injection():
    pod = make_pod()
    marked = apply_patch(pod, skip_patch(pod, Reason.PORT))

    assert marked["metadata"]["annotations"] == {"context-cache.io/inject-skipped": "port"}
    assert skip_patch(marked, Reason.PORT) == []
    assert "context-cache.io/inject-skipped" not in injected(marked)["metadata"]["annotations"]


def test_the_token_of_the_pod_s_account_stays_out_of_our_containers():
    """Admission mounts it where nothing is mounted. The engine's own is not touched."""
    after = injected(make_pod())
    path = "/var/run/secrets/kubernetes.io/serviceaccount"
    mounted = [mount for one in ours_of(after) for mount in one["volumeMounts"] if mount["mountPath"] == path]
    [volume] = [one for one in after["spec"]["volumes"] if one["name"] == "context-cache-no-token"]

    assert [(mount["name"], mount["readOnly"]) for mount in mounted] == [("context-cache-no-token", True)] * 3
    assert volume == {"name": "context-cache-no-token", "emptyDir": {}}
    assert path not in str(engine_of(after))
