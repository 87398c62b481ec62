"""What pods may do: restricted Pod Security, no rights but the two Roles, no secret where others read it."""

from __future__ import annotations

import json
import re

from tests.chart.each_release import in_each_release
from tests.chart.manifests import COMPONENT, Pod, env_of, identity, name_of, of_kind, pods
from tests.chart.releases import RELEASES
from tests.chart.rendering import render

BEYOND_RESTRICTED = {
    # Kernels are compiled at start, and not every compiler in vLLM's image keeps to the folders it is given. Pod
    # Security does not ask for this; the rule is ours.
    ("engine", "vllm"): {"readOnlyRootFilesystem"},
}
"""Containers and the rules that do not hold for them: none of Pod Security's own."""
VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}
"""What Pod Security `restricted` lets pods mount."""
RIGHTS = {
    "gateway": {
        ("discovery.k8s.io", "endpointslices", (), ("list", "watch")),
        ("", "pods", (), ("list", "watch")),
    },
}
"""Everything that anything of ours may ask of the Kubernetes API, all of it in its own namespace."""
PUBLIC_ENV = re.compile(r"^(?!.*(PASSWORD|TOKEN|API_KEY$|_SECRET$)).*$")


@in_each_release
def test_every_pod_is_restricted_but_for_what_is_written_down(release, documents):
    found: dict[tuple[str, str], set[str]] = {}
    # The values say so: Pod Security lets nobody mount a directory of the node.
    asked = {"volumes"} if release is RELEASES["sidecar on the node"] else set()
    for pod in pods(documents):
        for container in pod.containers:
            if broken := {name for name, holds in restricted(pod, container).items() if not holds}:
                kind = "engine" if pod.component.startswith("engine-") else pod.component
                found.setdefault((kind, container["name"]), set()).update(broken)

    assert not {key for key, broken in found.items() if broken - BEYOND_RESTRICTED.get(key, set()) - asked}, found


def restricted(pod: Pod, container: dict) -> dict[str, bool]:
    """Return the rules of Pod Security `restricted`, and two of our own, with whether they hold."""
    own, of_pod = container.get("securityContext", {}), pod.spec.get("securityContext", {})
    capabilities = own.get("capabilities", {})
    user = own.get("runAsUser", of_pod.get("runAsUser"))
    return {
        "host": not any(pod.spec.get(field) for field in ("hostNetwork", "hostPID", "hostIPC")),
        "hostPort": not any("hostPort" in port for port in container.get("ports", [])),
        "volumes": all(not (volume.keys() - {"name"} - VOLUMES) for volume in pod.spec.get("volumes", [])),
        "privileged": not own.get("privileged"),
        "allowPrivilegeEscalation": own.get("allowPrivilegeEscalation") is False,
        "capabilities": capabilities.get("drop") == ["ALL"]
        and set(capabilities.get("add", [])) <= {"NET_BIND_SERVICE"},
        "runAsNonRoot": own.get("runAsNonRoot", of_pod.get("runAsNonRoot")) is True and user != 0,
        "seccomp": own.get("seccompProfile", of_pod.get("seccompProfile", {})).get("type") == "RuntimeDefault",
        "procMount": own.get("procMount", "Default") == "Default",
        "sysctls": not of_pod.get("sysctls"),
        # Ours: nothing is written outside mounted volumes, and the user is one that no image gives a name to.
        "readOnlyRootFilesystem": own.get("readOnlyRootFilesystem") is True,
    }


def test_the_restricted_check_notices_each_rule():
    good = {
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "runAsNonRoot": True,
            "seccompProfile": {"type": "RuntimeDefault"},
            "readOnlyRootFilesystem": True,
        }
    }
    worse = {
        "host": ({"hostNetwork": True}, good),
        "hostPort": ({}, {**good, "ports": [{"hostPort": 80}]}),
        "volumes": ({"volumes": [{"name": "a", "hostPath": {"path": "/"}}]}, good),
        "sysctls": ({"securityContext": {"sysctls": [{"name": "a", "value": "1"}]}}, good),
    }
    worse |= {
        rule: ({}, {"securityContext": {**good["securityContext"], key: value}})
        for rule, key, value in (
            ("privileged", "privileged", True),
            ("allowPrivilegeEscalation", "allowPrivilegeEscalation", True),
            ("capabilities", "capabilities", {"drop": ["ALL"], "add": ["SYS_PTRACE"]}),
            ("runAsNonRoot", "runAsNonRoot", False),
            ("seccomp", "seccompProfile", {"type": "Unconfined"}),
            ("procMount", "procMount", "Unmasked"),
            ("readOnlyRootFilesystem", "readOnlyRootFilesystem", False),
        )
    }
    for rule, (spec, container) in worse.items():
        holds = restricted(Pod("Pod/a", {}, {}, spec), container)

        assert [name for name, value in holds.items() if not value] == [rule]


@in_each_release
def test_images_are_fixed_by_a_tag_or_a_digest(documents):
    for pod in pods(documents):
        for container in pod.containers:
            reference, _, digest = container["image"].partition("@")
            tag = reference.rpartition("/")[2].partition(":")[2]

            assert digest.startswith("sha256:") or (tag and tag != "latest"), (pod.owner, container["image"])


@in_each_release
def test_every_container_says_what_it_needs_and_the_most_memory_it_may_take(documents):
    for pod in pods(documents):
        for container in pod.containers:
            resources = container.get("resources", {})
            where = (pod.owner, container["name"])

            assert {"cpu", "memory"} <= resources.get("requests", {}).keys(), where
            assert "memory" in resources.get("limits", {}) or where[1] == "vllm", where


@in_each_release
def test_nobody_gets_the_environment_of_services(documents):
    """CONTEXT_CACHE_GATEWAY_PORT and its like would be read as settings by somebody, some day."""
    assert {pod.owner for pod in pods(documents) if pod.spec.get("enableServiceLinks") is not False} == set()


@in_each_release
def test_only_parts_that_ask_the_kubernetes_api_carry_a_token(documents):
    rights = {document["metadata"]["labels"].get(COMPONENT) for document in of_kind(documents, "Role")}
    for pod in pods(documents):
        mounted = pod.spec.get("automountServiceAccountToken")

        assert mounted is not None, pod.owner
        assert mounted <= (pod.component in {"gateway", "context-manager"}), pod.owner
        assert not (pod.component in rights and not mounted), pod.owner


@in_each_release
def test_rights_are_those_of_the_table_and_bound_to_their_own_account(documents):
    assert of_kind(documents, "ClusterRole", "ClusterRoleBinding") == []
    accounts = {name_of(account) for account in of_kind(documents, "ServiceAccount")}
    used = {pod.spec.get("serviceAccountName"): pod.component for pod in pods(documents)}
    for role in of_kind(documents, "Role"):
        component = role["metadata"]["labels"][COMPONENT]
        prefix = name_of(role).removesuffix(f"-{component}")
        found = {
            (group, resource, tuple(rule.get("resourceNames", ())), tuple(sorted(rule["verbs"])))
            for rule in role["rules"]
            for group in rule["apiGroups"]
            for resource in rule["resources"]
        }
        binding = next(one for one in of_kind(documents, "RoleBinding") if one["roleRef"]["name"] == name_of(role))
        [subject] = binding["subjects"]

        assert json.loads(json.dumps(sorted(RIGHTS[component])).replace("FULLNAME", prefix)) == json.loads(
            json.dumps(sorted(found))
        )
        assert binding["roleRef"]["kind"] == "Role"
        assert subject["kind"] == "ServiceAccount"
        assert used[subject["name"]] == component
        assert not accounts or subject["name"] in accounts


def test_without_rbac_and_accounts_none_is_made():
    documents = render(RELEASES["no rbac"])

    assert of_kind(documents, "Role", "RoleBinding", "ServiceAccount") == []


def secret_values(documents) -> set[str]:
    """Return every generated secret of a release as text, also what is inside a list or an URL."""
    texts = set()
    for secret in of_kind(documents, "Secret"):
        for key, value in {**secret.get("stringData", {}), **secret.get("data", {})}.items():
            if not key.endswith((".json", ".crt")):
                texts.add(value)
    return {text for text in texts if len(text) >= 16}


@in_each_release
def test_no_secret_is_in_arguments_variables_annotations_or_config_maps(documents):
    texts = secret_values(documents)
    for document in documents:
        if document["kind"] != "Secret":
            text = json.dumps(document)

            assert not [secret for secret in texts if secret in text], identity(document)


@in_each_release
def test_variables_that_sound_secret_come_from_secrets(documents):
    for pod in pods(documents):
        for container in pod.containers:
            for name, value in env_of(container).items():
                if not PUBLIC_ENV.match(name):
                    assert isinstance(value, dict), (pod.owner, name)
                    assert "secretKeyRef" in value, (pod.owner, name)


def test_a_redis_url_out_of_a_secret_is_nowhere_else():
    for name in ("valkey", "redis from a secret"):
        [value] = {
            json.dumps(env_of(container)["MANAGER_REDIS_URL"])
            for pod in pods(render(RELEASES[name]))
            for container in pod.containers
            if "MANAGER_REDIS_URL" in env_of(container)
        }

        assert "secretKeyRef" in value


@in_each_release
def test_files_with_secrets_are_mounted_for_the_group_alone(documents):
    for pod in pods(documents):
        for volume in pod.spec.get("volumes", []):
            if "secret" in volume:
                mode = volume["secret"].get("defaultMode")

                assert mode in {0o440, 0o400}, (pod.owner, volume["name"], mode)
                assert "fsGroup" in pod.spec["securityContext"], pod.owner
