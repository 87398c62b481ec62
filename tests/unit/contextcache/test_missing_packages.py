"""A command whose packages are not installed names the package to install, and prints no traceback."""

import sys

import pytest

from contextcache import __main__ as program
from contextcache.cli import serve
from contextcache.doctor import grpc_check
from contextcache.doctor.finding import Level


def test_without_typer_the_program_names_the_extra(monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "contextcache.cli.app", raising=False)
    monkeypatch.setitem(sys.modules, "typer", None)
    monkeypatch.setattr(sys, "argv", ["context-cache", "ls"])
    with pytest.raises(SystemExit) as ended:
        program.main()

    assert (ended.value.code, "pip install 'context-cache[cli]'" in capsys.readouterr().err) == (2, True)


@pytest.mark.parametrize(("name", "part"), serve.PARTS.items())
def test_without_the_server_distribution_a_part_names_it(monkeypatch, capsys, name, part):
    monkeypatch.setattr(serve, "find_spec", lambda _: None)

    assert serve.start(name, []) == 2
    assert f"install context-cache-server[{part.extra}]" in capsys.readouterr().err


def test_without_its_extra_a_part_names_the_missing_module(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [])

    def missing(*_, **__):
        raise ModuleNotFoundError("No module named 'redis'", name="redis")

    monkeypatch.setattr(serve.runpy, "run_module", missing)

    assert serve.start("manager", []) == 2
    assert "needs the module redis: install context-cache-server[manager]" in capsys.readouterr().err


def test_without_grpcio_the_doctor_skips_what_it_would_ask(monkeypatch):
    monkeypatch.setitem(sys.modules, "grpc", None)
    options = {"parts_dir": None, "server_name": "context-cache", "timeout_s": 1}
    (found,) = grpc_check.health("kv-sidecar", "127.0.0.1:1", **options)

    assert found.level is Level.SKIPPED
    assert "context-cache[grpc]" in found.text
