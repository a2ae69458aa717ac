# SPDX-License-Identifier: Apache-2.0
"""A certificate in files: what is there is served, and what comes in its place."""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
from datetime import UTC, datetime
from pathlib import Path

import pytest

from allotment.model.errors import UsageError
from allotment.scheduler.tls import context
from allotment.scheduler.tls.authority import CertificateSet, Lives, next_set
from allotment.scheduler.tls.context import CertificateFiles


def made() -> CertificateSet:
    found = next_set(datetime.now(UTC), names=("localhost",), kept=None, lives=Lives())
    assert found is not None
    return found


def write(folder: Path, found: CertificateSet, *, at: int) -> tuple[Path, Path]:
    paths = folder / "tls.crt", folder / "tls.key"
    for path, content in zip(paths, (found.server.certificate, found.server.key), strict=True):
        path.write_bytes(content)
        os.utime(path, (at, at))
    return paths


async def shown(files: CertificateFiles, trusted: CertificateSet) -> bool:
    """Whether somebody who trusts these is served."""
    context = ssl.create_default_context(cadata=trusted.bundle.decode("ascii"))
    server = await asyncio.start_server(
        lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=files.context
    )
    try:
        port = server.sockets[0].getsockname()[1]
        _, writer = await asyncio.open_connection(
            "127.0.0.1", port, ssl=context, server_hostname="localhost"
        )
    except ssl.SSLCertVerificationError:
        return False
    else:
        writer.close()
        with contextlib.suppress(OSError):  # whoever serves hangs up too
            await asyncio.wait_for(writer.wait_closed(), 30)
        return True
    finally:
        server.close()


def test_what_is_written_there_later_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context, "_LOOK_S", 0.01)
    old, new = made(), made()
    files = CertificateFiles.of(*write(tmp_path, old, at=1))
    assert files is not None

    async def test() -> None:
        running = asyncio.create_task(files.run())
        assert await shown(files, old)
        files.certificate.write_bytes(b"half of")
        os.utime(files.certificate, (2, 2))
        await asyncio.sleep(0.05)
        assert await shown(files, old)
        write(tmp_path, new, at=3)
        async with asyncio.timeout(20):
            while not await shown(files, new):  # noqa: ASYNC110 - a file tells nobody
                await asyncio.sleep(0.02)
        assert not running.done()
        running.cancel()

    asyncio.run(test())


def test_one_without_the_other_and_what_is_none_are_refused(tmp_path: Path) -> None:
    certificate, key = write(tmp_path, made(), at=1)
    assert CertificateFiles.of(None, None) is None
    for pair in ((certificate, None), (None, key)):
        with pytest.raises(UsageError, match="needs its key"):
            CertificateFiles.of(*pair)
    for wrong in (key, tmp_path / "nowhere"):
        with pytest.raises(UsageError, match="not a certificate and its key"):
            CertificateFiles.of(wrong, key)
