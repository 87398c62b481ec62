"""Only what is plainly spelled gets anywhere."""

import pytest

from gateway.paths import Kind, MethodNotAllowed, PathNotFound, kind_of

ENGINE_PATHS = frozenset({"/tokenize"})


@pytest.mark.parametrize(
    ("method", "path", "kind"),
    [
        ("POST", "/v1/context", Kind.CREATE),
        ("GET", "/v1/context", Kind.CONTROL),
        ("GET", "/v1/context/ctx_1", Kind.CONTROL),
        ("DELETE", "/v1/context/ctx_1", Kind.CONTROL),
        ("POST", "/v1/completions", Kind.COMPLETION),
        ("POST", "/v1/chat/completions", Kind.COMPLETION),
        ("GET", "/v1/models", Kind.STATELESS),
        ("POST", "/v1/embeddings", Kind.STATELESS),
        ("GET", "/v1/models/org/some-model:1", Kind.STATELESS),
        ("POST", "/tokenize", Kind.STATELESS),
        ("GET", "/healthz", Kind.OWN),
    ],
)
def test_every_call_has_its_kind(method, path, kind):
    assert kind_of(method, path, ENGINE_PATHS) is kind


@pytest.mark.parametrize(
    "path",
    [
        "/", "", "v1/context", "*", "//v1/context", "/v1//context", "/v1/context/", "/v1/context//x", "/v1/./context",
        "/v1/x/../context", "/v1/context/..", "/V1/context", "/v1/Context", "/v1/CONTEXT/ctx_1", "/v1/context%2f",
        "/v1\\context", "/v1/context\x00", "/v1/conte\u00dft", "/v1/context/a/b/c", "/v1/completions/",
        "/v1/context/ctx_1/fork", "/v1/context/ctx_1/rewind", "/reset_prefix_cache", "/sleep", "/V1/completions",
    ],
)  # fmt: skip
@pytest.mark.parametrize("method", ["POST", "GET", "DELETE"])
def test_tricks_and_unknown_paths_are_not_found(method, path):
    with pytest.raises(PathNotFound):
        kind_of(method, path, ENGINE_PATHS)


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("PATCH", "/v1/context/ctx_1", "GET, DELETE"),
        ("POST", "/v1/context/ctx_1", "GET, DELETE"),
        ("DELETE", "/v1/context", "GET, POST"),
        ("POST", "/readyz", "GET"),
    ],
)
def test_a_wrong_method_names_the_right_ones(method, path, allow):
    with pytest.raises(MethodNotAllowed) as caught:
        kind_of(method, path, ENGINE_PATHS)

    assert caught.value.allow == allow
