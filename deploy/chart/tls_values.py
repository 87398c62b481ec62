"""Values of mutual TLS between the parts of the release."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, WithJsonSchema

from deploy.chart.kubernetes_values import SecretName
from deploy.chart.section import Section

_DURATION = r"^([0-9]+(h|m|s))+$"
Duration = Annotated[str, WithJsonSchema({"type": "string", "pattern": _DURATION, "examples": ["2160h", "720h30m"]})]
"""A Go duration."""


class IssuerReference(Section):
    """A cert-manager issuer that has a CA: Vault, CA or a private one; ACME issuers sign no such names."""

    name: SecretName = Field("", description="name of the Issuer; required with certManager.enabled")
    kind: str = Field("Issuer", min_length=1, description="Issuer, ClusterIssuer or a kind of group's")
    group: str = Field("cert-manager.io", min_length=1, description="API group of the kind")


class CertManager(Section):
    """One certificate for every part, issued and rotated by cert-manager."""

    enabled: bool = Field(False, description="create a Certificate; needs cert-manager in the cluster")
    issuer_ref: IssuerReference = Field(default_factory=IssuerReference, description="who signs it")
    duration: Duration = Field("2160h", description="life of a certificate (90 days)")
    renew_before: Duration = Field(
        "720h", description="time before its end at which it is renewed; parts read the new files without a restart"
    )


class Tls(Section):
    """Certificates that parts show each other on every port that is no probe's."""

    enabled: bool = Field(
        False, description="mutual TLS between gateway, context-manager, sidecars and Envoy, HTTPS to vLLM"
    )
    cert_manager: CertManager = Field(default_factory=CertManager, description="certificates by cert-manager")
    existing_secret: SecretName = Field(
        "",
        description="Secret with tls.crt, tls.key and ca.crt instead; the certificate must be good for server and "
        "client authentication and carry tls.serverName",
    )
    server_name: Annotated[
        str, WithJsonSchema({"type": "string", "pattern": r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", "maxLength": 253})
    ] = Field(
        "context-cache",
        description="name that every part's certificate carries; it is checked instead of addresses, which change with "
        "every pod",
    )
