"""Only what is plainly spelled gets anywhere."""

import pytest

from contextcache.errors import MethodNotAllowed, PathNotFound
from gateway.paths import Kind, kind_of, nearest_path, own_path
from tests.kit.engine_calls import known_calls

ENGINE_PATHS = frozenset({"GET /version"})
INFERENCE = """
    GET /v1/models
    POST /v1/completions /v1/chat/completions /v1/chat/completions/batch /v1/systemone
    POST /v1/messages /v1/messages/count_tokens /v1/responses
    POST /v1/embeddings /v2/embed /pooling /classify
    POST /score /v1/score /generative_scoring /rerank /v1/rerank /v2/rerank
    POST /tokenize /detokenize
    POST /v1/audio/transcriptions /v1/audio/translations
"""
"""What of vLLM's calls is for clients; said again, by what they do."""
PASSED = {(line.split()[0], path) for line in INFERENCE.strip().splitlines() for path in line.split()[1:]}
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")


@pytest.mark.parametrize(
    ("method", "path", "kind"),
    [
        ("POST", "/v1/context", Kind.CREATE),
        ("GET", "/v1/context", Kind.CONTROL),
        ("GET", "/v1/context/ctx_1", Kind.CONTROL),
        ("DELETE", "/v1/context/ctx_1", Kind.CONTROL),
        ("PATCH", "/v1/context/ctx_1", Kind.CONTROL),
        ("POST", "/v1/context/ctx_1/rewind", Kind.CONTROL),
        ("POST", "/v1/context/ctx_1/fork", Kind.CONTROL),
        ("POST", "/v1/context/ctx_1/compact", Kind.CONTROL),
        ("POST", "/v1/responses/compact/", Kind.CONTROL),
        ("POST", "/v1/completions", Kind.COMPLETION),
        ("POST", "/v1/chat/completions", Kind.COMPLETION),
        ("GET", "/v1/models", Kind.STATELESS),
        ("GET", "/v1/models/a", Kind.CONTROL),
        ("GET", "/v1/models/org/model:tag", Kind.CONTROL),
        ("POST", "/v1/context/", Kind.CREATE),
        ("GET", "/v1/context/", Kind.CONTROL),
        ("GET", "/v1/context/ctx_1/", Kind.CONTROL),
        ("POST", "/v1/context/ctx_1/fork/", Kind.CONTROL),
        ("GET", "/v1/usage/", Kind.CONTROL),
        ("GET", "/v1/models/a/", Kind.CONTROL),
        ("GET", "/healthz/", Kind.OWN),
        ("GET", "/console/", Kind.OWN),
        ("POST", "/v1/embeddings", Kind.STATELESS),
        ("POST", "/tokenize", Kind.STATELESS),
        ("GET", "/version", Kind.STATELESS),
        ("GET", "/healthz", Kind.OWN),
        ("GET", "/", Kind.OWN),
    ],
)
def test_every_call_has_its_kind(method, path, kind):
    assert kind_of(method, path, ENGINE_PATHS) is kind


@pytest.mark.parametrize(
    "path",
    [
        "", "v1/context", "*", "//v1/context", "/v1//context", "/v1/context//", "/v1/context//x", "/v1/./context",
        "/v1/x/../context", "/v1/context/..", "/V1/context", "/v1/Context", "/v1/CONTEXT/ctx_1", "/v1/context%2f",
        "/v1\\context", "/v1/context\x00", "/v1/conte\u00dft", "/v1/context/a/b/c", "/v1/completions/",
        "/v1/models/", "/v1/models//", "/v1/models/..", "/v1/tokenize", "/version/", "/v1/context/ctx_1/forks",
        "/v1/context/ctx_1/rewind//", "/metrics/", "/v1/context/ctx_1/Rewind", "/console/a/b",
        "/reset_prefix_cache", "/sleep", "/V1/completions",
    ],
)  # fmt: skip
def test_tricks_and_unknown_paths_are_not_found(path):
    for method in ("POST", "GET", "DELETE"):
        with pytest.raises(PathNotFound):
            kind_of(method, path, ENGINE_PATHS)


def test_what_leads_to_the_page_is_read_and_nothing_that_looks_like_it():
    for method, path in (("POST", "/"), ("PUT", "/"), ("GET", "//"), ("GET", "/."), ("GET", "/.."), ("GET", "/?")):
        with pytest.raises(PathNotFound):
            kind_of(method, path, ENGINE_PATHS)


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("PUT", "/v1/context/ctx_1", "GET, PATCH, DELETE"),
        ("POST", "/v1/context/ctx_1", "GET, PATCH, DELETE"),
        ("GET", "/v1/context/ctx_1/rewind", "POST"),
        ("DELETE", "/v1/context", "GET, POST"),
        ("POST", "/readyz", "GET, HEAD"),
        ("GET", "/v1/completions", "POST"),
        ("PUT", "/v1/models", "GET"),
        ("DELETE", "/v1/models/a", "GET"),
        ("POST", "/version", "GET"),
    ],
)
def test_a_wrong_method_names_the_right_ones(method, path, allow):
    with pytest.raises(MethodNotAllowed) as caught:
        kind_of(method, path, ENGINE_PATHS)

    assert caught.value.allow == allow


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/v1/contexts", "/v1/context"),
        ("/v1/contexts/ctx_1", "/v1/context/{session_id}"),
        ("/context", "/v1/context"),
        ("/v1/Context", "/v1/context"),
        ("/v1/context/ctx_1/forks", "/v1/context/{session_id}/fork"),
        ("/v1/context/ctx_1/a/b", "/v1/context/{session_id}"),
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/v1/chat/completion", "/v1/chat/completions"),
        ("/v1/models/", "/v1/models"),
        ("/v1/completions/", "/v1/completions"),
        ("/health", "/healthz"),
    ],
)
def test_a_path_that_is_not_found_names_the_nearest(path, meant):
    """Seen to fail: `no such path`, and nothing else."""
    with pytest.raises(PathNotFound) as caught:
        kind_of("GET", path, ENGINE_PATHS)

    assert caught.value.message == f"no such path: did you mean {meant}?"


@pytest.mark.parametrize("path", ["", "/", "//", "/foo", "/v1/threads", "/metrics/", "/reset_prefix_cache", "/" * 9000])
def test_a_path_that_is_near_none_names_none(path):
    assert nearest_path(path) is None


def test_one_slash_at_the_end_of_a_path_of_ours_is_taken_off_and_nothing_else():
    assert own_path("/v1/context/ctx_1/") == "/v1/context/ctx_1"
    for path in ("/v1/context//", "/v1/completions/", "/metrics/", "/", "/v1/models/", "//healthz/", "/v1/context"):
        assert own_path(path) == path


def is_passed(method: str, path: str, more: frozenset[str] = frozenset()) -> bool:
    """Return whether a request goes on to a pod."""
    try:
        return kind_of(method, path, more) in {Kind.STATELESS, Kind.COMPLETION}
    except (PathNotFound, MethodNotAllowed):
        return False


def test_of_all_calls_that_the_engine_has_inference_passes_and_nothing_else():
    paths = {path.replace("{", "").replace("}", "") for _, path in known_calls()}

    assert set(known_calls()) >= PASSED
    assert {(method, path) for method in METHODS for path in paths if is_passed(method, path)} == PASSED


def test_a_call_that_the_operator_lists_passes_with_its_method_only():
    listed = frozenset({"POST /v1/load_lora_adapter"})

    assert is_passed("POST", "/v1/load_lora_adapter", listed)
    assert not is_passed("GET", "/v1/load_lora_adapter", listed)
    assert not is_passed("POST", "/v1/unload_lora_adapter", listed)
