# SPDX-License-Identifier: Apache-2.0
"""What `allot doctor` says of a cluster's policy against pods that mount the state folder."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from allotment.cli import doctor
from allotment.kube.errors import ObjectMissingError

POLICY = "allotment-state-folder"


@pytest.mark.parametrize(
    ("missing", "spec", "outcome", "text"),
    [
        ("", {}, "ok", "refused by the policy"),
        ("", {"validationActions": ["Warn", "Audit"]}, "note", "refuses nothing"),
        ("", {"policyName": "other"}, "note", "refuses nothing"),
        ("policies", {}, "note", "no policy"),
        ("policybindings", {}, "note", "no policy"),
    ],
)
def test_a_policy_counts_if_it_is_there_and_denies(
    monkeypatch: pytest.MonkeyPatch, missing: str, spec: dict[str, Any], outcome: str, text: str
) -> None:
    class Api:
        server = "https://api.test"

        async def get(self, path: str, *, asked: str) -> bytes:
            if missing and path.endswith(f"validatingadmission{missing}/{POLICY}"):
                raise ObjectMissingError(asked)
            binding = {"policyName": POLICY, "validationActions": ["Deny"], **spec}
            return json.dumps({"spec": binding}).encode()

    @asynccontextmanager
    async def connect(_: object) -> AsyncIterator[Api]:
        yield Api()

    monkeypatch.setattr("allotment.kube.clients.connect", connect)
    monkeypatch.setenv("KUBECONFIG", "/of/a/cluster")
    (finding,) = doctor._cluster()  # noqa: SLF001 - the other checks are of this machine
    assert finding.outcome == outcome
    assert text in finding.detail
    assert "https://api.test" in finding.detail
