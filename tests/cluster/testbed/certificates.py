# SPDX-License-Identifier: Apache-2.0
"""Who may talk to the API server, and how they know it: keys, tokens, kubeconfigs.

Tokens are made anew for each cluster. There is a user for each part of Kubernetes with the name and
groups that its built-in roles expect, `admin`, and `agent` for an agent that runs outside of a pod:
that one may nothing until a test binds it to a role.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import trustme
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

SERVICE_ADDRESS = "10.96.0.1"
"""Where pods find the API server: the first address of the services' range."""

_NAMES = ("localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc")


@dataclass(frozen=True, slots=True)
class User:
    """A user of the API server's token file."""

    name: str
    groups: tuple[str, ...] = ()


def users(node: str) -> dict[str, User]:
    """By short name: the kubeconfig's file, and what its command line is called."""
    return {
        "admin": User("admin", ("system:masters",)),
        "scheduler": User("system:kube-scheduler"),
        "controller-manager": User("system:kube-controller-manager"),
        "kubelet": User(f"system:node:{node}", ("system:nodes",)),
        "agent": User("agent"),
    }


@dataclass(frozen=True, slots=True)
class Credentials:
    """The files of one cluster."""

    folder: Path

    @property
    def authority(self) -> Path:
        """The certificate that signed the API server's."""
        return self.folder / "ca.crt"

    @property
    def certificate(self) -> Path:
        """The API server's."""
        return self.folder / "server.crt"

    @property
    def key(self) -> Path:
        """The API server's."""
        return self.folder / "server.key"

    @property
    def service_accounts(self) -> Path:
        """The key that service accounts' tokens are signed with."""
        return self.folder / "service-accounts.key"

    @property
    def tokens(self) -> Path:
        """The API server's token file."""
        return self.folder / "tokens.csv"

    def kubeconfig(self, user: str) -> Path:
        """The kubeconfig of a user, by its short name."""
        return self.folder / f"{user}.kubeconfig"


def make_credentials(folder: Path, *, address: str, node: str) -> Credentials:
    """Makes all of a cluster's credentials, for an API server at this address, port 443."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    made = Credentials(folder)
    _make_certificates(made, addresses=["127.0.0.1", SERVICE_ADDRESS, address])
    tokens = {name: secrets.token_hex(16) for name in users(node)}
    lines = []
    for name, user in users(node).items():
        groups = ",".join(user.groups)
        lines.append(f'{tokens[name]},{user.name},{name},"{groups}"\n')
        _write_kubeconfig(made, name, server=f"https://{address}", token=tokens[name])
    made.tokens.write_text("".join(lines), encoding="utf-8")
    made.tokens.chmod(0o600)
    return made


def _make_certificates(made: Credentials, *, addresses: Sequence[str]) -> None:
    authority = trustme.CA(organization_name="testbed-authority")
    authority.cert_pem.write_to_path(made.authority)
    server = authority.issue_cert(*_NAMES, *addresses, common_name="kube-apiserver")
    for place, certificate in enumerate(server.cert_chain_pems):
        certificate.write_to_path(made.certificate, append=place > 0)
    _write_key(made.key, server.private_key_pem.bytes())
    service_accounts = ec.generate_private_key(ec.SECP256R1())
    # In the older encoding, which the API server reads public keys from as well.
    form = serialization.PrivateFormat.TraditionalOpenSSL
    pem = service_accounts.private_bytes(
        serialization.Encoding.PEM, form, serialization.NoEncryption()
    )
    _write_key(made.service_accounts, pem)


def _write_key(path: Path, pem: bytes) -> None:
    path.touch(mode=0o600)
    path.write_bytes(pem)


def _write_kubeconfig(made: Credentials, name: str, *, server: str, token: str) -> None:
    # JSON is YAML.
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [
            {
                "name": "testbed",
                "cluster": {"server": server, "certificate-authority": str(made.authority)},
            }
        ],
        "users": [{"name": name, "user": {"token": token}}],
        "contexts": [{"name": "testbed", "context": {"cluster": "testbed", "user": name}}],
        "current-context": "testbed",
    }
    path = made.kubeconfig(name)
    path.touch(mode=0o600)
    path.write_text(json.dumps(config, indent=1), encoding="utf-8")
