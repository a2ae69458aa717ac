# SPDX-License-Identifier: Apache-2.0
"""Lists of objects, page by page: no more of them in memory at once than one answer has.

And reading any answer: what one object's author can write must not make all others unreadable.
"""

from collections.abc import AsyncIterator, Mapping
from typing import TypeVar

import msgspec

from allotment.kube.clients import Api
from allotment.kube.errors import KubeError
from allotment.kube.nesting import shallow
from allotment.kube.objects import ObjectList

__all__ = ["decoded", "pages"]

_ItemT = TypeVar("_ItemT")
_DecodedT = TypeVar("_DecodedT")


async def pages(
    api: Api,
    path: str,
    decoder: "msgspec.json.Decoder[ObjectList[_ItemT]]",
    *,
    asked: str,
    params: Mapping[str, str],
) -> AsyncIterator[ObjectList[_ItemT]]:
    """Yield a list's pages; `params` has how many objects each may have (`limit`).

    All are of the version of the first one. Raises `KubeError`; of these `GoneError` where there
    was so long between two pages that the server has forgotten that version.
    """
    asking = dict(params)
    while True:
        page = decoded(decoder, await api.get(path, asked=asked, params=asking), asked=asked)
        yield page
        next_page = page.metadata.next_page
        if not next_page or next_page == asking.get("continue"):
            return
        asking["continue"] = next_page


def decoded(
    decoder: "msgspec.json.Decoder[_DecodedT]", data: bytes | msgspec.Raw, *, asked: str
) -> _DecodedT:
    """Decode what the API server has answered. Raises `KubeError`.

    Where something in it is nested deeper than the decoder goes, that is null.
    """
    try:
        try:
            return decoder.decode(data)
        except RecursionError:
            return decoder.decode(shallow(bytes(data)))
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise KubeError(
            f"the API server's answer to {asked} is not understood: {error}",
            hint="is this the API server's address, and not a proxy's?",
        ) from error
