# SPDX-License-Identifier: Apache-2.0
"""Where certificates are kept, and where the API server is told whom to trust.

Two objects, read and changed as a whole or not at all: each change names the version that it was
made of, so that of two who change the same, one is told and looks again.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from allotment.kube.clients import Api, PatchKind
from allotment.kube.errors import KubeError, ObjectMissingError
from allotment.kube.objects import Metadata

__all__ = ["KeptSecret", "Secret", "Webhook", "WebhookConfiguration"]

T = TypeVar("T")


class _Narrow(msgspec.Struct, kw_only=True, rename="camel"):
    """A part of an object."""


class _SecretObject(_Narrow):
    metadata: Metadata
    data: dict[str, bytes] | None = None
    """In base64, which msgspec reads as bytes."""


class _ClientConfig(_Narrow):
    ca_bundle: bytes = b""


class _Condition(_Narrow):
    name: str = ""
    expression: str = ""


class _WebhookObject(_Narrow):
    name: str
    client_config: _ClientConfig = msgspec.field(default_factory=_ClientConfig)
    match_conditions: list[_Condition] | None = None


class _ConfigurationObject(_Narrow):
    metadata: Metadata
    webhooks: list[_WebhookObject] | None = None


_SECRET = msgspec.json.Decoder(_SecretObject)
_CONFIGURATION = msgspec.json.Decoder(_ConfigurationObject)


@dataclass(frozen=True, slots=True)
class KeptSecret:
    """A Secret as it was read."""

    version: str
    data: Mapping[str, bytes] = field(default_factory=dict)
    uid: str = ""


@dataclass(frozen=True, slots=True)
class Webhook:
    """What of one webhook of a configuration is ours to say."""

    name: str
    bundle: bytes = b""
    """Certificates in PEM."""
    conditions: Mapping[str, str] = field(default_factory=dict)
    """Expressions by name."""


class Secret:
    """One Secret."""

    def __init__(self, api: Api, *, namespace: str, name: str) -> None:
        """Ask nothing yet."""
        self._api = api
        self._folder = f"/api/v1/namespaces/{namespace}/secrets"
        self._name = name
        self.name = f"{namespace}/{name}"

    async def read(self) -> KeptSecret | None:
        """Return it; None: there is none. Raises `KubeError`."""
        try:
            asked = f"get secret {self.name}"
            body = await self._api.get(f"{self._folder}/{self._name}", asked=asked)
        except ObjectMissingError:
            return None
        item = _decoded(_SECRET, body, asked)
        its = item.metadata
        return KeptSecret(its.resource_version, item.data or {}, its.uid)

    async def write(self, data: Mapping[str, bytes], *, over: KeptSecret | None) -> None:
        """Write all of its data in place of what was read; None: there was none.

        Raises `ConflictError`: somebody else wrote meanwhile. `KubeError`.
        """
        if over is None:
            item = {
                "apiVersion": "v1",
                "kind": "Secret",
                "type": "Opaque",
                "metadata": {"name": self._name},
                "data": dict(data),
            }
            await self._api.create(self._folder, item, asked=f"create secret {self.name}")
            return
        gone: dict[str, bytes | None] = dict.fromkeys(over.data)
        change = {"metadata": {"resourceVersion": over.version}, "data": {**gone, **data}}
        await self._api.patch(
            f"{self._folder}/{self._name}", change, asked=f"patch secret {self.name}"
        )


class WebhookConfiguration:
    """A MutatingWebhookConfiguration."""

    def __init__(self, api: Api, *, name: str) -> None:
        """Ask nothing yet."""
        self._api = api
        self._path = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/" + name
        self.name = name

    async def read(self) -> tuple[str, tuple[Webhook, ...]]:
        """Return its version and its webhooks. Raises `ObjectMissingError`, `KubeError`."""
        asked = f"get mutating webhook configuration {self.name}"
        item = _decoded(_CONFIGURATION, await self._api.get(self._path, asked=asked), asked)
        webhooks = tuple(
            Webhook(
                each.name,
                each.client_config.ca_bundle,
                {one.name: one.expression for one in each.match_conditions or ()},
            )
            for each in item.webhooks or ()
        )
        return item.metadata.resource_version, webhooks

    async def write(self, webhooks: tuple[Webhook, ...], *, version: str) -> None:
        """Say whom to trust and when to ask; all else of it stays as its administrator wrote it.

        Raises `ConflictError`: somebody else wrote since that version. `KubeError`.
        """
        change = {
            "metadata": {"resourceVersion": version},
            "webhooks": [
                {
                    "name": each.name,
                    "clientConfig": {"caBundle": each.bundle},
                    "matchConditions": [
                        {"name": name, "expression": text} for name, text in each.conditions.items()
                    ],
                }
                for each in webhooks
            ],
        }
        asked = f"patch mutating webhook configuration {self.name}"
        await self._api.patch(self._path, change, asked=asked, kind=PatchKind.STRATEGIC)


def _decoded(decoder: "msgspec.json.Decoder[T]", body: bytes, asked: str) -> T:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise KubeError(
            f"the API server's answer to {asked} is not understood: {error}",
            hint="is this the API server's address, and not a proxy's?",
        ) from error
