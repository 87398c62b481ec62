"""The tests that may be skipped, and why: any other that is skipped fails.

Nothing is gained by a test that nobody sees not to run. A new line here needs a reason that a reader believes.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest


@dataclass(frozen=True, slots=True)
class Skip:
    """One reason not to run tests."""

    file: str
    """Where the tests are, from the root of the repository."""
    said: str
    """What the skip says."""
    because: str
    """Why that is right, and who runs them when."""


ALLOWED = (
    Skip(
        "tests/contract/test_kubernetes_api.py",
        "TEST_KUBECONFIG is not set",
        "the contract runs on the fake everywhere, and on a real API server where there is one",
    ),
    Skip(
        "tests/contract/test_kubernetes_discovery.py",
        "TEST_KUBECONFIG is not set",
        "as above",
    ),
    *(
        Skip(
            f"tests/chart/test_chart_{name}.py",
            "TEST_KUBECONFIG is not set",
            "Helm runs against the API server of these tests everywhere, and against a real one where there is one",
        )
        for name in ("api_server", "upgrades", "scaling", "sizes", "storage_kinds")
    ),
    *(
        Skip(
            f"tests/integration/test_{name}.py",
            "npm's registry is not reachable",
            "the TypeScript client is built with npm's packages; CI has the registry",
        )
        for name in ("typescript_client", "page_examples")
    ),
    Skip(
        "tests/images/test_images.py",
        "missing: ",
        "buildah and mmdebstrap are installed by the test where that needs no question: as root on a Debian, as in CI",
    ),
    Skip(
        "tests/gpu/test_gpu_copies.py",
        "no GPU that torch can use",
        "the same contract runs on the CPU over a twin of the driver; a machine with a GPU runs `make test-gpu`",
    ),
    Skip(
        "tests/integration/test_kv_events.py",
        "DYNAMO_PYTHON has no ai-dynamo-runtime",
        "the package has 75 MB; vLLM's own decoder subscribes in the same test everywhere",
    ),
    Skip(
        "tests/faults/test_fault_tools.py",
        "mounting is not allowed here",
        "a disk that is really full needs a file system of its own; elsewhere the interposed calls say ENOSPC",
    ),
    Skip(
        "tests/vllm/test_fp8_kv.py",
        "this CPU keeps no KV in eight bits",
        "vLLM's kernels for it need AVX-512; the fingerprint's part in it is unit-tested everywhere",
    ),
    *(
        Skip(
            f"tests/upgrade/test_{name}.py",
            "no release has been tagged yet",
            "nobody can have installed one; releasing the first writes the snapshot that these run beside this code",
        )
        for name in ("rolling_upgrade", "side_by_side")
    ),
)


def unlisted_skip(report: pytest.TestReport | pytest.CollectReport) -> str | None:
    """Return what is wrong when the report is of a skip, or of an expected failure, that is not listed."""
    expected = hasattr(report, "wasxfail")
    if not (report.skipped or expected):
        return None
    file = report.nodeid.partition("::")[0]
    said = f"xfail: {report.wasxfail}" if expected else _reason(report)
    if any(skip.file == file and skip.said == said for skip in ALLOWED):
        return None
    return f"skipped, and not on the list of tests/kit/skips.py: {said}"


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    told = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return told.removeprefix("Skipped: ")
