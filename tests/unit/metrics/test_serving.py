# SPDX-License-Identifier: Apache-2.0
"""The agent's HTTP server: what the kubelet and Prometheus ask, and that it comes and goes."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time

import pytest
from prometheus_client import CollectorRegistry, Counter

from allotment.metrics import serving
from allotment.metrics.serving import Probes, Server
from allotment.model.addresses import parse_address
from allotment.model.errors import PrerequisiteError, UsageError

PLACES = 16


def fetch(server: Server, path: str, **headers: str) -> tuple[int, str, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    with contextlib.closing(connection):
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), answer.headers["Content-Type"]


@pytest.fixture
def registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    Counter("things", "Things.", registry=registry).inc()
    return registry


def test_it_serves_figures_in_both_formats(registry: CollectorRegistry) -> None:
    with Server("127.0.0.1:0", registry, Probes()) as server:
        status, body, kind = fetch(server, "/metrics?x=1")
        assert (status, kind.partition(";")[0]) == (200, "text/plain")
        assert "things_total 1.0" in body
        _, body, kind = fetch(server, "/metrics", Accept="application/openmetrics-text")
        assert kind.startswith("application/openmetrics-text")
        assert body.endswith("# EOF\n")


def test_further_metrics_follow_in_the_format_of_the_answer(registry: CollectorRegistry) -> None:
    def more(is_open: bool) -> bytes:  # noqa: FBT001 - as it is called
        return b"open 1\n# EOF\n" if is_open else b"plain 1\n"

    with Server("127.0.0.1:0", registry, Probes(), more) as server:
        assert fetch(server, "/metrics")[1].endswith("\nplain 1\n")
        for version in ("", "; version=1.0.0", "; version=1.0.0; escaping=underscores"):
            accept = f"application/openmetrics-text{version}"
            _, body, kind = fetch(server, "/metrics", Accept=accept)
            assert kind.startswith("application/openmetrics-text")
            assert "things_total 1.0\n" in body
            assert body.endswith("\nopen 1\n# EOF\n")
            assert body.count("# EOF") == 1


def test_the_probes_say_what_is_amiss(registry: CollectorRegistry) -> None:
    amiss: list[str] = []
    probes = Probes(is_healthy=lambda: (), is_ready=lambda: amiss)
    with Server("127.0.0.1:0", registry, probes) as server:
        assert fetch(server, "/readyz")[:2] == (200, "ok\n")
        amiss += ["the kubelet has not been reached", "no GPU"]
        assert fetch(server, "/readyz")[:2] == (503, "the kubelet has not been reached\nno GPU\n")
        assert fetch(server, "/healthz")[:2] == (200, "ok\n")
        assert fetch(server, "/")[0] == fetch(server, "/leading")[0] == 404


def test_where_one_of_several_leads_each_says_whether_it_does(registry: CollectorRegistry) -> None:
    amiss: list[str] = []
    with Server("127.0.0.1:0", registry, Probes(is_leading=lambda: amiss)) as server:
        assert fetch(server, "/leading")[:2] == (200, "ok\n")
        amiss += ["another replica leads: b"]
        assert fetch(server, "/leading")[:2] == (503, "another replica leads: b\n")


def test_it_ends_and_gives_its_address_back_even_with_a_client_that_hangs(
    registry: CollectorRegistry,
) -> None:
    server = Server("127.0.0.1:0", registry, Probes())
    port = server.port
    with socket.create_connection(("127.0.0.1", port)) as hanging:
        hanging.send(b"GET /metr")
        assert fetch(server, "/healthz")[0] == 200
        server.close()
        server.close()
    with Server(f"127.0.0.1:{port}", registry, Probes()) as again:
        assert fetch(again, "/healthz")[0] == 200


def test_clients_that_dawdle_take_no_more_than_their_places(registry: CollectorRegistry) -> None:
    before = threading.active_count()
    with Server("127.0.0.1:0", registry, Probes()) as server, contextlib.ExitStack() as stack:
        for _ in range(3 * PLACES):
            client = socket.create_connection(("127.0.0.1", server.port))
            stack.enter_context(client)
            client.send(b"GET /metr")
        for _ in range(5):
            assert fetch(server, "/healthz")[0] == 200
        assert threading.active_count() - before <= PLACES + 1


@pytest.mark.parametrize("is_reading", [False, True], ids=["slow to ask", "slow to read"])
def test_a_request_has_its_time_and_no_more(
    monkeypatch: pytest.MonkeyPatch, registry: CollectorRegistry, *, is_reading: bool
) -> None:
    monkeypatch.setattr(serving, "_WHOLE_S", 0.4)
    many = Counter("many", "Many.", ["x"], registry=registry)
    for number in range(20_000 if is_reading else 0):
        many.labels("x" * 100 + str(number))
    with Server("127.0.0.1:0", registry, Probes()) as server:
        before = threading.active_count()
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.settimeout(0.1)
            client.send(b"GET /metrics HTTP/1.0\r\n" + (b"\r\n" if is_reading else b""))
            end = time.monotonic() + 40
            is_served = True
            while is_served and time.monotonic() < end:
                if is_reading:
                    time.sleep(0.1)
                    is_served = threading.active_count() > before
                    continue
                try:
                    client.send(b"A: b\r\n")  # never silent for long
                    is_served = client.recv(1) != b""
                except TimeoutError:
                    pass
                except ConnectionError:  # it hung up on a line that it had not read
                    is_served = False
            assert not is_served


def test_a_request_without_end_is_cut_off(registry: CollectorRegistry) -> None:
    with (
        Server("127.0.0.1:0", registry, Probes()) as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=30) as client,
    ):
        client.send(b"GET /healthz HTTP/1.0\r\n")
        sent = 0
        with contextlib.suppress(ConnectionError):
            while sent < 32 << 20:
                sent += client.send(b"A: " + b"b" * 60_000 + b"\r\n")
        assert sent < 32 << 20
        assert fetch(server, "/healthz")[0] == 200


def test_an_address_that_is_taken_is_refused_with_it(registry: CollectorRegistry) -> None:
    with Server("127.0.0.1:0", registry, Probes()) as server:
        address = f"127.0.0.1:{server.port}"
        with pytest.raises(PrerequisiteError) as caught:
            Server(address, registry, Probes())
        assert address in caught.value.message


@pytest.mark.parametrize(
    ("text", "address"),
    [
        (":9446", ("", 9446)),
        ("127.0.0.1:80", ("127.0.0.1", 80)),
        ("[::1]:80", ("::1", 80)),
        ("localhost:0", ("localhost", 0)),
    ],
)
def test_addresses_are_understood(text: str, address: tuple[str, int]) -> None:
    assert parse_address(text) == address


@pytest.mark.parametrize("text", ["", "9446", "host", "host:", "host:http", "host:65536"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_address(text)
