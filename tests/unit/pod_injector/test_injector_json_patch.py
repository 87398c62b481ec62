"""The difference of two documents, applied by somebody else, gives the second."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pod_injector.json_patch import json_patch
from tests.unit.pod_injector.pods import apply_patch

_KEYS = st.sampled_from(["a", "b", "a/b", "~", "context-cache.io/inject", ""])
_DOCUMENTS = st.recursive(
    st.none() | st.booleans() | st.integers(0, 3) | st.text("ab", max_size=2),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_KEYS, inner, max_size=3),
    max_leaves=12,
)


@given(_DOCUMENTS, _DOCUMENTS)
def test_a_patch_turns_one_document_into_the_other(before, after):
    patch = json_patch(before, after)

    assert repr(apply_patch(before, patch)) == repr(after) or apply_patch(before, patch) == after


@given(_DOCUMENTS)
def test_equal_documents_have_an_empty_patch(document):
    assert json_patch(document, document) == []


def test_items_added_to_a_list_are_added_and_the_rest_is_not_sent_again():
    patch = json_patch(
        {"containers": [{"name": "a"}, {"name": "b"}]},
        {"containers": [{"name": "x"}, {"name": "a"}, {"name": "b"}, {"name": "y"}]},
    )

    assert patch == [
        {"op": "add", "path": "/containers/0", "value": {"name": "x"}},
        {"op": "add", "path": "/containers/3", "value": {"name": "y"}},
    ]


def test_a_true_is_not_a_one():
    assert json_patch({"a": [1]}, {"a": [True]}) == [{"op": "replace", "path": "/a/0", "value": True}]
