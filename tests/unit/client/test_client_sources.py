"""The generated half of the client: it is written when a source is newer, with a class for each public code."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from contextcache import errors as tree
from contextcache.client import errors
from deploy.client_sources import write

ROOT = Path(__file__).parents[3]
CLIENT = Path("contextcache", "client")


@pytest.fixture
def checkout(tmp_path):
    """A checkout as git has it, without generated files, whose sources are a minute old."""
    for path in [Path("contextcache", "errors.py"), *(Path(ROOT, CLIENT, "_async").glob("*.py"))]:
        copy = tmp_path / (path if not path.is_absolute() else path.relative_to(ROOT))
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, copy)
        _change_age(copy, -60)
    return tmp_path


def _change_age(file, seconds):
    at = file.stat().st_mtime + seconds
    os.utime(file, (at, at))


def test_a_clean_checkout_gets_all_generated_files(checkout):
    write(checkout)

    written = {str(path.relative_to(checkout / CLIENT)) for path in (checkout / CLIENT).rglob("*.py")}
    assert {"errors.py", "_sync/__init__.py", "_sync/contexts.py", "_sync/transport.py"} <= written
    sync = (checkout / CLIENT / "_sync" / "contexts.py").read_text()
    assert "class ContextCache(" in sync
    assert "await " not in sync
    assert not list((checkout / CLIENT).glob(".generated-*"))


@pytest.mark.parametrize("source", ["contextcache/errors.py", "contextcache/client/_async/contexts.py"])
def test_a_changed_source_is_generated_again_and_an_unchanged_one_is_not(checkout, source):
    write(checkout)
    generated = checkout / CLIENT / "_sync" / "transport.py"
    generated.write_text("kept")
    write(checkout)
    unchanged = generated.read_text()
    _change_age(checkout / source, 3600)
    write(checkout)

    assert unchanged == "kept"
    assert "class SyncTransport" in generated.read_text()


def test_every_code_of_the_api_is_a_class_that_is_named_after_it():
    """Seen to fail with `public=False` left out of a class: its code was a client's."""
    public = {code for code, error in tree.ERRORS_BY_CODE.items() if error.is_public}

    assert set(errors.BY_CODE) == public
    assert {code: cls.__name__ for code, cls in errors.BY_CODE.items()} == {
        code: code.title().replace("_", "") for code in public
    }
    assert not {"lease_lost", "cache_ref_pending", "key_not_at_hand", "invalid_identity"} & public
