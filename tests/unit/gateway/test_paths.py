"""Only what is plainly spelled gets anywhere."""

import pytest

from gateway.paths import Kind, MethodNotAllowed, PathNotFound, kind_of
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
        ("POST", "/v1/completions", Kind.COMPLETION),
        ("POST", "/v1/chat/completions", Kind.COMPLETION),
        ("GET", "/v1/models", Kind.STATELESS),
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
        "", "v1/context", "*", "//v1/context", "/v1//context", "/v1/context/", "/v1/context//x", "/v1/./context",
        "/v1/x/../context", "/v1/context/..", "/V1/context", "/v1/Context", "/v1/CONTEXT/ctx_1", "/v1/context%2f",
        "/v1\\context", "/v1/context\x00", "/v1/conte\u00dft", "/v1/context/a/b/c", "/v1/completions/",
        "/v1/models/a", "/v1/tokenize", "/version/", "/v1/context/ctx_1/forks",
        "/v1/context/ctx_1/rewind/", "/v1/context/rewind/", "/v1/context/ctx_1/Rewind",
        "/reset_prefix_cache", "/sleep", "/V1/completions",
    ],
)  # fmt: skip
def test_tricks_and_unknown_paths_are_not_found(path):
    for method in ("POST", "GET", "DELETE"):
        with pytest.raises(PathNotFound):
            kind_of(method, path, ENGINE_PATHS)


def test_what_leads_to_the_page_is_a_get_and_nothing_that_looks_like_it():
    for method, path in (("POST", "/"), ("HEAD", "/"), ("GET", "//"), ("GET", "/."), ("GET", "/.."), ("GET", "/?")):
        with pytest.raises(PathNotFound):
            kind_of(method, path, ENGINE_PATHS)


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("PUT", "/v1/context/ctx_1", "GET, PATCH, DELETE"),
        ("POST", "/v1/context/ctx_1", "GET, PATCH, DELETE"),
        ("GET", "/v1/context/ctx_1/rewind", "POST"),
        ("DELETE", "/v1/context", "GET, POST"),
        ("POST", "/readyz", "GET"),
    ],
)
def test_a_wrong_method_names_the_right_ones(method, path, allow):
    with pytest.raises(MethodNotAllowed) as caught:
        kind_of(method, path, ENGINE_PATHS)

    assert caught.value.allow == allow


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
