"""`python -m deploy.local.s3_server PORT`: a real S3 server on loopback for `STORE=s3`, which forgets all when it ends.

moto, in an environment of its own under .build, made at the first start: boto3, which it brings, and the Kubernetes
client want different releases of python-dateutil.
"""

from __future__ import annotations

import os
import sys
from http import HTTPStatus
from pathlib import Path

import httpx

from deploy.local.environments import made
from deploy.local.ports import LOOPBACK
from deploy.local.progress import exit_code

WANTED = ("moto==5.2.5", "flask==3.1.3", "flask-cors==6.0.5")
BUCKET = "kv-cache"
_TIMEOUT_S = 5.0


@exit_code
def main() -> None:
    """Install what is missing, then become the server. Return the exit status if that fails."""
    server = installed()
    os.execv(server, [str(server), "-H", LOOPBACK, "-p", sys.argv[1]])


def installed() -> Path:
    """Return the server's program, installed. Raises StepFailed."""
    return made("s3", WANTED, needed_bytes=1 << 30) / "bin" / "moto_server"


def has_bucket(port: int) -> bool:
    """Make the bucket, and return whether it is there."""
    try:
        answer = httpx.put(f"http://{LOOPBACK}:{port}/{BUCKET}", timeout=_TIMEOUT_S, trust_env=False)
    except httpx.HTTPError:
        return False
    return answer.status_code == HTTPStatus.OK


def environment(port: int) -> dict[str, str]:
    """Return what a client of it needs in its environment: names and words that it takes, whatever they are."""
    return {
        "AWS_ENDPOINT_URL": f"http://{LOOPBACK}:{port}",
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "local",
        "AWS_SECRET_ACCESS_KEY": "local",
    }


if __name__ == "__main__":
    sys.exit(main())
