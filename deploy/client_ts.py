"""`make client-ts`: generate the TypeScript client's types from the OpenAPI document, compile the client and pack it.

The sources are beside the Python client: both follow one document and one set of rules. The types are committed, as
the gRPC stubs are. Everything else is made in `.build/client-ts`.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from deploy.local.npm import PROGRAMS, installed
from deploy.local.progress import Step, exit_code, run_logged
from deploy.release import current

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "contextcache" / "client" / "typescript"
BUILT = ROOT / ".build" / "client-ts"
TYPES = SOURCE / "src" / "api.ts"
_LOG = ROOT / ".build" / "logs" / "client-ts.log"
_OPTIONS = (
    "--default-non-nullable=false",  # a field with a default may be left out of a request
    "--empty-objects-unknown",  # an object without properties may hold any
    "--alphabetize",
)


def built() -> Path:
    """Return the folder of the compiled package; two that build at once wait for each other. Raises StepFailed."""
    BUILT.mkdir(parents=True, exist_ok=True)
    with BUILT.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        installed(SOURCE, BUILT)
        sources = {path.name: path.read_text() for path in sorted(SOURCE.rglob("*.*"))}
        stamp, wanted = BUILT / ".compiled", json.dumps([current(), sources])
        if not stamp.exists() or stamp.read_text() != wanted:
            for name in ("src", "dist"):
                shutil.rmtree(BUILT / name, ignore_errors=True)
            shutil.copytree(SOURCE, BUILT, dirs_exist_ok=True)
            shutil.copy(ROOT / "LICENSE", BUILT)
            package = json.loads((SOURCE / "package.json").read_text())
            (BUILT / "package.json").write_text(json.dumps(package | {"version": current()}, indent=2))
            tsc()
            stamp.write_text(wanted)
    return BUILT


def tsc(*arguments: str) -> None:
    """Run TypeScript's compiler in the folder of the build. Raises StepFailed with its findings."""
    program = BUILT / "node_modules" / "typescript" / "bin" / "tsc"
    run_logged([str(PROGRAMS / "node"), str(program), *arguments], what="tsc", log=_LOG, cwd=BUILT)


def types() -> str:
    """Return the types of the OpenAPI document. Raises StepFailed."""
    installed(SOURCE, BUILT)
    document, output = BUILT / "openapi.json", BUILT / "api.ts"
    document.write_text(text := json.dumps(for_types()))
    program = BUILT / "node_modules" / "openapi-typescript" / "bin" / "cli.js"
    command = [str(PROGRAMS / "node"), str(program), str(document), "--output", str(output), *_OPTIONS]
    run_logged(command, what="openapi-typescript", log=_LOG, cwd=BUILT)
    return f"{mark(text)}\n{output.read_text()}"


def mark(document: str) -> str:
    """Return the first line of the types: it tells without Node whether they are those of a document."""
    return f"// SHA-256 of the document: {hashlib.sha256(document.encode()).hexdigest()}"


def for_types() -> dict[str, Any]:
    """Return the OpenAPI document as the client needs it: `ErrorCode` has all codes, and answers have one type.

    The client throws every error response as one class. Types of each status would be half of the file. It reads event
    streams itself, and a second media type would make the type of an answer unknown.
    """
    from gateway.http.openapi import document

    found: dict[str, Any] = json.loads(json.dumps(document()))
    found["info"]["version"] = ""  # a release changes no type
    codes: set[str] = set()
    for operation in (operation for path in found["paths"].values() for operation in path.values()):
        for response in operation["responses"].values():
            response.get("content", {}).pop("text/event-stream", None)
        for status in [status for status in operation["responses"] if not status.startswith("2")]:
            schema = operation["responses"].pop(status).get("content", {}).get("application/json", {}).get("schema", {})
            error = schema.get("properties", {}).get("error", {}).get("properties", {})
            codes.update(error.get("code", {}).get("enum", ()))
        error = {"schema": {"$ref": "#/components/schemas/Error"}}
        operation["responses"]["default"] = {"description": "An error.", "content": {"application/json": error}}
    found["components"]["schemas"]["ErrorCode"] = {"enum": sorted(codes), "description": "Codes of all errors."}
    return found


@exit_code
def main() -> None:
    """Write the types into the tree, compile and pack. Return the exit status."""
    with Step("types of the OpenAPI document"):
        TYPES.write_text(types())
    with Step("TypeScript client"):
        folder = built()
        for earlier in folder.glob("*.tgz"):
            earlier.unlink()
        run_logged([str(PROGRAMS / "npm"), "pack"], what="npm pack", log=_LOG, cwd=folder)
    print(*folder.glob("*.tgz"))


if __name__ == "__main__":
    sys.exit(main())
