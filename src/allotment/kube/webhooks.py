# SPDX-License-Identifier: Apache-2.0
"""The webhook's Secret and configuration.

Each write names the version that it was based on: of two concurrent writers, one fails and reads
again.
"""

from collections.abc import Mapping

import msgspec

from allotment.kube.clients import Api, PatchKind, find, read
from allotment.kube.objects import Metadata, Narrow


class _SecretObject(Narrow):
    metadata: Metadata
    data: dict[str, bytes] | None = None
    """In base64, which msgspec decodes to bytes."""


class _ClientConfig(Narrow):
    ca_bundle: bytes = b""


class _Condition(Narrow):
    name: str = ""
    expression: str = ""


class _WebhookObject(Narrow):
    name: str
    client_config: _ClientConfig = msgspec.field(default_factory=_ClientConfig)
    match_conditions: list[_Condition] | None = None


class _ConfigurationObject(Narrow):
    metadata: Metadata
    webhooks: list[_WebhookObject] | None = None


_SECRET = msgspec.json.Decoder(_SecretObject)
_CONFIGURATION = msgspec.json.Decoder(_ConfigurationObject)


class KeptSecret(msgspec.Struct, frozen=True):
    """A Secret as read."""

    version: str
    data: Mapping[str, bytes] = msgspec.field(default_factory=dict)
    uid: str = ""


class Webhook(msgspec.Struct, frozen=True):
    """Our fields of a webhook."""

    name: str
    bundle: bytes = b""
    """Certificates in PEM."""
    conditions: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Expressions of match conditions, by name."""


class Secret:
    """A Secret at the API server."""

    def __init__(self, api: Api, *, namespace: str, name: str) -> None:
        self._api = api
        self._folder = f"/api/v1/namespaces/{namespace}/secrets"
        self._name = name
        self.name = f"{namespace}/{name}"

    async def read(self) -> KeptSecret | None:
        path = f"{self._folder}/{self._name}"
        item = await find(self._api, path, _SECRET, asked=f"get secret {self.name}")
        if item is None:
            return None
        metadata = item.metadata
        return KeptSecret(metadata.resource_version, item.data or {}, metadata.uid)

    async def write(self, data: Mapping[str, bytes], *, over: KeptSecret | None) -> None:
        """Replace all its data; `over` None: create it.

        Raises `ConflictError` after another client's write, `KubeError`.
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
        self._api = api
        self._path = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations/" + name
        self.name = name

    async def read(self) -> tuple[str, tuple[Webhook, ...]]:
        """Return its version and webhooks. Raises `ObjectMissingError`, `KubeError`."""
        asked = f"get mutating webhook configuration {self.name}"
        item = await read(self._api, self._path, _CONFIGURATION, asked=asked)
        webhooks = tuple(
            Webhook(
                webhook.name,
                webhook.client_config.ca_bundle,
                {
                    condition.name: condition.expression
                    for condition in webhook.match_conditions or ()
                },
            )
            for webhook in item.webhooks or ()
        )
        return item.metadata.resource_version, webhooks

    async def write(self, webhooks: tuple[Webhook, ...], *, version: str) -> None:
        """Write our fields of the webhooks; all others stay as they are.

        Raises `ConflictError` after another client's write, `KubeError`.
        """
        change = {
            "metadata": {"resourceVersion": version},
            "webhooks": [
                {
                    "name": webhook.name,
                    "clientConfig": {"caBundle": webhook.bundle},
                    "matchConditions": [
                        {"name": name, "expression": text}
                        for name, text in webhook.conditions.items()
                    ],
                }
                for webhook in webhooks
            ],
        }
        asked = f"patch mutating webhook configuration {self.name}"
        await self._api.patch(self._path, change, asked=asked, kind=PatchKind.STRATEGIC)
