"""Envoy accepts the bootstrap of each combination of settings that changes the bootstrap's structure."""

from __future__ import annotations

import itertools
import json
import subprocess
from pathlib import Path

import pytest

from deploy.local.envoy import envoy_command
from gateway.envoy.render import write_folder
from gateway.envoy.settings import EnvoySettings
from tests.kit.certificates import CertificateFiles

ROOT = Path(__file__).parents[2]
ADDRESSES = {"pods": ["10.0.0.1:80", "[fd00::1]:80"], "gateways": ["10.0.0.2:1,10.0.0.2:2", "[::1]:1,[::1]:2"]}
NAMES = {"pods": ["engine.pods.local:8010"], "engines": ["engine.pods.local:8000"], "gateways": ["gateway:1,gateway:2"]}
PUBLIC_CA = {"traces_ca_file": "{folder}/current/ca.crt"}
AXES: list[list[dict]] = [
    [ADDRESSES, NAMES],
    [{}, {f"tls_{kind}_file": f"{{folder}}/current/{kind}" for kind in ("cert", "key", "ca")}],
    [{}, {f"listen_{kind}_file": f"{{folder}}/current/{kind}" for kind in ("cert", "key")}],
    [{}, {"api_keys_file": "{folder}/keys.json"}],
    [{}, {"metrics_listen": "[::]:9090", "admin_host": "::1"}],
    [{}, {"cors_origins": ["https://chat.example.com"], "engine_paths": ["GET /version", "PUT /v1/a/b"]}],
    [{}, {"traces_endpoint": "http://otel:4317"}, PUBLIC_CA | {"traces_endpoint": "https://otel.example.com"}],
    [{"access_log": "/dev/null"}, {"access_log": "", "fail_open_stateless": False, "max_body_bytes": 1000}],
]
"""Settings that add or remove a part of the bootstrap; the values of an axis exclude each other."""
HOSTILE = "o\"n'e: {{ x }} ${y} %z% #\t\u2028\x7f{% \U0001f600 &a *b |"
"""Text that means something to Jinja2, to YAML, to JSON or to Envoy's formats."""


@pytest.fixture
def folder(tmp_path):
    """A folder with certificates and a key file."""
    CertificateFiles(tmp_path)
    for kind, file in (("cert", "tls.crt"), ("key", "tls.key"), ("ca", "ca.crt")):
        (tmp_path / "current" / kind).symlink_to(file)
    (tmp_path / "keys.json").write_text(json.dumps({"keys": [{"sha256": "0" * 64, "tenant": "demo"}]}))
    return tmp_path


def settings_of(folder: Path, *told: dict) -> EnvoySettings:
    merged = {name: value for each in told for name, value in each.items()}
    placed = {name: value.format(folder=folder) if name.endswith("_file") else value for name, value in merged.items()}
    return EnvoySettings(**placed, config_dir=str(folder / "made"))


def complaint_about(settings: EnvoySettings) -> str:
    """Return what Envoy says to a bootstrap that it refuses; empty: it accepts it."""
    command = envoy_command(write_folder(settings), "--mode", "validate")
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=90, check=False)
    return "" if result.returncode == 0 else result.stderr


@pytest.mark.parametrize("variant", [0, -1], ids=["least", "most"])
def test_envoy_accepts_the_bootstrap_with_the_least_and_with_the_most(folder, variant):
    assert complaint_about(settings_of(folder, *(axis[variant] for axis in AXES))) == ""


@pytest.mark.thorough
def test_envoy_accepts_the_bootstrap_of_every_variant(folder):
    """384 variants of a third of a second each."""
    complaints = {
        tuple(axis.index(value) for axis, value in zip(AXES, told, strict=True)): found
        for told in itertools.product(*AXES)
        if (found := complaint_about(settings_of(folder, *told)))
    }

    assert complaints == {}


def test_envoy_accepts_a_bootstrap_with_hostile_values(folder):
    told = [axis[-1] for axis in AXES]
    names = {"tls_server_name": HOSTILE, "access_log": "/dev/null"}

    assert complaint_about(settings_of(folder, *told, names)) == ""
