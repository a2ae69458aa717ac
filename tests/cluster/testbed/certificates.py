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

from testbed.build import run

SERVICE_ADDRESS = "10.96.0.1"
"""Where pods find the API server: the first address of the services' range."""

_NAMES = ("localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc")
_EC = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-noenc")


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
    authority_key = made.folder / "ca.key"
    _openssl(
        *("req", "-x509", *_EC, "-days", "3650", "-subj", "/CN=testbed-authority"),
        *("-addext", "keyUsage=critical,keyCertSign,cRLSign"),
        *("-keyout", authority_key, "-out", made.authority),
    )
    names = [f"DNS:{name}" for name in _NAMES] + [f"IP:{address}" for address in addresses]
    request = made.folder / "server.csr"
    extensions = made.folder / "server.cnf"
    extensions.write_text(
        "basicConstraints=critical,CA:FALSE\n"
        "keyUsage=critical,digitalSignature\n"
        "extendedKeyUsage=serverAuth\n"
        "subjectKeyIdentifier=hash\n"
        "authorityKeyIdentifier=keyid\n"
        f"subjectAltName={','.join(names)}\n",
        encoding="utf-8",
    )
    _openssl("req", *_EC, "-subj", "/CN=kube-apiserver", "-keyout", made.key, "-out", request)
    _openssl(
        *("x509", "-req", "-in", request, "-days", "3650", "-extfile", extensions),
        *("-CA", made.authority, "-CAkey", authority_key, "-out", made.certificate),
    )
    # In the older encoding, which the API server reads public keys from as well.
    curve = ("-genkey", "-noout", "-name", "prime256v1")
    _openssl("ecparam", *curve, "-out", made.service_accounts)


def _openssl(*arguments: str | Path) -> None:
    run(["openssl", *map(str, arguments)])


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
