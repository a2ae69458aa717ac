# SPDX-License-Identifier: Apache-2.0
"""The API server as a test sees it: paths and dicts, as in the API's reference.

Synchronous, one connection a thread, kept open: a handshake a request would cost more than the
requests do.
"""

from __future__ import annotations

import http.client
import json
import select
import ssl
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

# What JSON brings. Tests pick it apart; a type for each object would be Kubernetes' own size.
Json = dict[str, Any]

_PATCHES = {
    "merge": "application/merge-patch+json",
    "strategic": "application/strategic-merge-patch+json",
    "json": "application/json-patch+json",
    "apply": "application/apply-patch+yaml",
}


class ApiError(Exception):
    """The API server refused: `status` is HTTP's, the message its own."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


class Api:
    """A client with one user's rights. For any number of threads."""

    def __init__(self, kubeconfig: Path, *, timeout_s: float = 30) -> None:
        config = json.loads(kubeconfig.read_text(encoding="utf-8"))
        cluster = config["clusters"][0]["cluster"]
        self._address = urlsplit(cluster["server"]).netloc
        self._token = config["users"][0]["user"]["token"]
        self._context = ssl.create_default_context(cafile=cluster["certificate-authority"])
        self._timeout_s = timeout_s
        self._local = threading.local()
        self._opened: list[http.client.HTTPSConnection] = []

    def get(self, path: str, **query: str) -> Json:
        """An object or a list: `get("/api/v1/nodes/node-1")`."""
        return self._call("GET", path, query=query)

    def find(self, path: str, **query: str) -> Json | None:
        """As `get`; None where there is nothing."""
        try:
            return self.get(path, **query)
        except ApiError as error:
            if error.status == http.client.NOT_FOUND:
                return None
            raise

    def items(self, path: str, **query: str) -> list[Json]:
        """What a list holds: `items("/api/v1/pods", fieldSelector="spec.nodeName=node-1")`."""
        return list(self.get(path, **query)["items"])

    def post(self, path: str, body: Mapping[str, Any], **query: str) -> Json:
        """Creates an object in the collection at `path`."""
        return self._call("POST", path, body=body, query=query)

    def put(self, path: str, body: Mapping[str, Any], **query: str) -> Json:
        """Replaces an object."""
        return self._call("PUT", path, body=body, query=query)

    def patch(self, path: str, body: Any, *, kind: str = "merge", **query: str) -> Json:  # noqa: ANN401
        """Changes an object; `kind` is merge, strategic, json (a list of steps) or apply."""
        return self._call("PATCH", path, body=body, query=query, media_type=_PATCHES[kind])

    def apply(self, path: str, body: Mapping[str, Any]) -> Json:
        """Makes the object at `path` be like this, whether it is there or not."""
        return self.patch(path, body, kind="apply", fieldManager="testbed", force="true")

    def delete(self, path: str, **query: str) -> Json | None:
        """Deletes an object or a collection; None where there is nothing."""
        try:
            return self._call("DELETE", path, query=query)
        except ApiError as error:
            if error.status == http.client.NOT_FOUND:
                return None
            raise

    def text(self, path: str, **query: str) -> str:
        """What is no JSON: a pod's log."""
        return self._request("GET", path, query=query).decode("utf-8", errors="replace")

    def close(self) -> None:
        """Closes the connections of all threads. The next request opens a new one."""
        while self._opened:
            self._opened.pop().close()
        self._local = threading.local()

    def _call(
        self,
        method: str,
        path: str,
        *,
        body: Any = None,  # noqa: ANN401 - what JSON takes
        query: Mapping[str, str] | None = None,
        media_type: str = "application/json",
    ) -> Json:
        answer = self._request(method, path, body=body, query=query, media_type=media_type)
        return dict(json.loads(answer))

    def _request(
        self,
        method: str,
        path: str,
        *,
        body: Any = None,  # noqa: ANN401 - what JSON takes
        query: Mapping[str, str] | None = None,
        media_type: str = "application/json",
    ) -> bytes:
        target = f"{path}?{urlencode(query)}" if query else path
        content = None if body is None else json.dumps(body, separators=(",", ":")).encode()
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": media_type}
        status, answer = self._send(method, target, content, headers)
        if status >= http.client.BAD_REQUEST:
            raise ApiError(status, _message_of(answer))
        return answer

    def _send(
        self, method: str, target: str, content: bytes | None, headers: Mapping[str, str]
    ) -> tuple[int, bytes]:
        kept = self._kept()
        connection = kept or self._connect()
        is_sent = False
        try:
            connection.request(method, target, body=content, headers=dict(headers))
            is_sent = True
            response = connection.getresponse()
            return response.status, response.read()
        except (http.client.HTTPException, OSError):
            self._drop(connection)
            # A kept connection may have ended with the API server that it led to. Once more on a
            # new one, except where the request may have been carried out.
            if kept is None or (is_sent and method == "POST"):
                raise
        return self._send(method, target, content, headers)

    def _kept(self) -> http.client.HTTPSConnection | None:
        connection: http.client.HTTPSConnection | None = getattr(self._local, "connection", None)
        if connection is None or connection.sock is None:
            return connection
        # Nobody has asked anything: there is nothing to read but the other side's goodbye.
        poll = select.poll()
        poll.register(connection.sock, select.POLLIN)
        if not poll.poll(0):
            return connection
        self._drop(connection)
        return None

    def _drop(self, connection: http.client.HTTPSConnection) -> None:
        connection.close()
        self._local.connection = None

    def _connect(self) -> http.client.HTTPSConnection:
        connection = http.client.HTTPSConnection(
            self._address, timeout=self._timeout_s, context=self._context
        )
        self._local.connection = connection
        self._opened.append(connection)
        return connection


def _message_of(answer: bytes) -> str:
    try:
        return str(json.loads(answer)["message"])
    except (ValueError, KeyError, TypeError):
        return answer.decode("utf-8", errors="replace")[:500]
