"""The template of Envoy's configuration: each value arrives as it was given."""

from __future__ import annotations

import json

import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.envoy.render import BOOTSTRAP, rendered
from gateway.envoy.settings import EnvoySettings
from tests.kit.envoy_names import connection_manager

NEEDED = {"gateways": ["127.0.0.1:1,127.0.0.1:2"], "pods": ["127.0.0.1:3"]}
TLS = {"tls_cert_file": "/a/tls.crt", "tls_key_file": "/a/tls.key", "tls_ca_file": "/b/ca.crt"}
# A variable of the environment holds any characters but NUL.
texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1)


@given(text=texts)
@example(text='", "@type": x}')
@example(text="{{ settings }}{% raw %}")
@example(text="a: b # c\n- d")
@example(text="*to_pod")
@example(text="no")
@example(text="\x7f\x85\u2028\ufeff\U0001f600")
def test_a_value_of_any_characters_is_one_value(text):
    settings = EnvoySettings(**NEEDED, **TLS, tls_server_name=text, access_log=text, api_keys_file=f"/{text}")
    files = rendered(settings)
    pods = next(found for found in files[BOOTSTRAP]["static_resources"]["clusters"] if found["name"] == "pods")
    own, authority = (files[f"{name}.json"]["resources"][0] for name in ("own-certificate", "trusted-ca"))

    assert pods["transport_socket"]["typed_config"]["sni"] == text
    assert connection_manager(files[BOOTSTRAP])["access_log"][-1]["typed_config"]["path"] == text
    assert own["tls_certificate"]["certificate_chain"] == {"filename": "/a/tls.crt"}
    assert authority["validation_context"]["match_typed_subject_alt_names"][0]["matcher"] == {"exact": text}


def test_the_files_are_json_that_envoy_reads_as_it_reads_yaml():
    files = rendered(EnvoySettings(**NEEDED, **TLS))

    assert all(yaml.safe_load(json.dumps(content)) == content for content in files.values())
    assert "x-shared" not in files[BOOTSTRAP]
