"""One rendered pod: containers started, probed, restarted and ended in the order in which the kubelet does it."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.kit.rendered.container import Container
from tests.kit.rendered.substitutions import Substitutions
from tests.kit.rendered.volumes import Objects, Volumes
from tests.kit.until import wait_until

START_S = 420.0
"""A container may take so long to pass its startup probe, whatever the chart says of a machine of its own."""
_POLL_S = 0.3
_VARIABLE = re.compile(r"\$\((\w+)\)")


class Pod:
    """`template` is a pod template, or a Pod."""

    def __init__(
        self,
        template: Mapping[str, Any],
        *,
        name: str,
        namespace: str,
        address: str,
        folder: Path,
        objects: Objects,
        volumes: Volumes,
        substitutions: Callable[[str, Mapping[str, Path]], Substitutions],
        kubeconfig: Path,
    ) -> None:
        self.name, self.namespace, self.address = name, namespace, address
        self.metadata: Mapping[str, Any] = template["metadata"]
        self.spec: Mapping[str, Any] = template["spec"]
        self.labels: Mapping[str, str] = self.metadata.get("labels", {})
        self.ready = self.terminating = False
        self._volumes, self._objects, self._kubeconfig = volumes, objects, kubeconfig
        init = self.spec.get("initContainers", [])
        made = {one["name"]: self._container(one, folder, substitutions) for one in [*init, *self.spec["containers"]]}
        self.sidecars = [made[one["name"]] for one in init if one.get("restartPolicy") == "Always"]
        self._first = [made[one["name"]] for one in init]
        self.containers = [made[one["name"]] for one in self.spec["containers"]]
        self._started: set[str] = set()

    @property
    def running(self) -> list[Container]:
        """Those that stay."""
        return [*self.sidecars, *self.containers]

    @property
    def ports(self) -> dict[str, int]:
        """Names and numbers of all ports."""
        return {name: port for one in self.running for name, port in one.ports.items()}

    @property
    def started(self) -> bool:
        """Whether every container has passed its startup probe."""
        return self._started >= {one.name for one in self.running}

    def __getitem__(self, name: str) -> Container:
        return next(one for one in self.running if one.name == name)

    def start(self) -> None:
        """Start its containers; return when each has passed its startup probe."""
        for one in self._first:
            if one in self.sidecars:
                self.restart(one)
            else:
                one.start()
                assert one.wait(START_S) == 0, one.last_words()
        for one in self.containers:
            one.start()
        for one in self.containers:
            self._await_started(one)

    def restart(self, container: Container) -> None:
        """Start one again after its end, and wait for its startup probe."""
        self._started.discard(container.name)
        container.start()
        self._await_started(container)

    def observe(self) -> None:
        """Look at the readiness of every container; no container is asked before it is started."""
        self.ready = all(one.name in self._started and self._is_ready(one) for one in self.running)

    def _is_ready(self, container: Container) -> bool:
        """One success makes it ready; to lose that, it fails as often in a row as its probe says."""
        probe = container.spec.get("readinessProbe", {})
        tries = probe.get("failureThreshold", 3) if self.ready else 1
        return any(container.passes("readiness") for _ in range(tries))

    def run(self, within_s: float) -> int:
        """Run a pod that ends, and return the exit status of its only container."""
        (only,) = self.containers
        only.start()
        try:
            return only.wait(within_s)
        except subprocess.TimeoutExpired as exc:
            raise AssertionError(only.last_words()) from exc
        finally:
            only.kill()

    def end(self) -> list[str]:
        """End it as a deletion does, and return the names of the containers that had to be killed.

        All containers at once: preStop hook, then SIGTERM, then SIGKILL when the grace period is over. Native sidecars
        last, in reverse.
        """
        ends_at_s = time.monotonic() + self.spec["terminationGracePeriodSeconds"]

        def ends(one: Container) -> bool:
            self._before_stop(one)
            return one.terminate(max(0.0, ends_at_s - time.monotonic()))

        with ThreadPoolExecutor(len(self.containers)) as pool:
            ended = [*pool.map(ends, self.containers), *map(ends, reversed(self.sidecars))]
        self._volumes.remove()
        order = [*self.containers, *reversed(self.sidecars)]
        return [one.name for one, in_time in zip(order, ended, strict=True) if not in_time]

    def kill(self) -> None:
        """Leave nothing of it."""
        for one in [*self.containers, *self._first]:
            one.kill()
        self._volumes.remove()

    def _container(
        self,
        spec: Mapping[str, Any],
        folder: Path,
        substitutions: Callable[[str, Mapping[str, Path]], Substitutions],
    ) -> Container:
        change = substitutions(self.address, self._volumes.mounts(spec))
        self._volumes.fill(spec, change)
        env: dict[str, str] = {}
        for item in spec.get("env", []):
            # As Kubernetes does: `$(NAME)` is what a variable before it holds.
            env[item["name"]] = _VARIABLE.sub(lambda found: env[found[1]], self._value(item))
        assert not spec.get("envFrom"), "not known here"
        more = {"KUBECONFIG": str(self._kubeconfig)} if self.spec.get("automountServiceAccountToken", True) else {}
        return Container(spec, env=env, more_env=more, change=change, address=self.address, folder=folder)

    def _value(self, item: Mapping[str, Any]) -> str:
        source = item.get("valueFrom")
        if source is None:
            return item.get("value", "")
        (kind,) = source
        if kind == "secretKeyRef":
            return self._objects.value("Secret", source[kind]["name"], source[kind]["key"])
        fields = {"metadata.name": self.name, "metadata.namespace": self.namespace, "status.podIP": self.address}
        return fields[source["fieldRef"]["fieldPath"]]

    def _await_started(self, container: Container) -> None:
        what = f"{self.name}/{container.name}"

        def passes() -> bool:
            status = container.exit_status()
            assert status is None, f"{what} ended with {status}:\n{container.last_words()}"
            return container.passes("startup")

        wait_until(passes, what=f"{what} starts; it writes to {container.log}", deadline_s=START_S, interval_s=_POLL_S)
        self._started.add(container.name)

    @staticmethod
    def _before_stop(container: Container) -> None:
        """Run its preStop hook: here always a sleep, which ends with the container."""
        if hook := container.spec.get("lifecycle", {}).get("preStop"):
            deadline_s = time.monotonic() + hook["sleep"]["seconds"]
            while container.exit_status() is None and time.monotonic() < deadline_s:
                time.sleep(_POLL_S)
