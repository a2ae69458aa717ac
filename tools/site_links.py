# SPDX-License-Identifier: Apache-2.0
"""A hook of MkDocs: pages keep links that work in the repository, and the site gets its own.

A link is resolved from the page's place in the repository. A page of the site stays a link between
pages. Any other file becomes a link to the repository's address, or plain text without one. A link
to nothing is left as it is, so that the strict build reports it.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
INCLUDED = {
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security.md",
    "CHANGELOG.md": "project/changes.md",
    "README.md": "index.md",
}
"""Pages whose source is outside docs/. README.md is the repository's form of index.md."""
_HOME = {page: source for source, page in INCLUDED.items() if page != "index.md"}
_LINK = re.compile(r"(?P<text>!?\[(?:[^\[\]]|\[[^\]]*\])*\])\((?P<target>[^)\s]+)\)")
_FENCE = re.compile(r"^(?P<fence> *```).*?^ *```", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages whose source is outside docs/."""
    for page, source in _HOME.items():
        content = (ROOT / source).read_text("utf-8")
        files.append(File.generated(config, page, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Give a page the links that the site needs."""
    here = page.file.src_uri
    source = _HOME.get(here, f"docs/{here}")
    pages = {file.src_uri for file in files}
    parts, end = [], 0
    for fence in _FENCE.finditer(markdown):
        parts += [_relinked(markdown[end : fence.start()], source, here, pages, config), fence[0]]
        end = fence.end()
    return "".join([*parts, _relinked(markdown[end:], source, here, pages, config)])


def _relinked(text: str, source: str, here: str, pages: set[str], config: MkDocsConfig) -> str:
    def replaced(link: re.Match[str]) -> str:
        target = site_target(link["target"], source=source, here=here, pages=pages)
        if target is not None:
            return f"{link['text']}({target})"
        path, sign, anchor = link["target"].partition("#")
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        if not config.repo_url:
            return link["text"].strip("![]")
        kind = "tree" if (ROOT / path).is_dir() else "blob"
        address = f"{config.repo_url.rstrip('/')}/{kind}/main/{path}{sign}{anchor}"
        return f"{link['text']}({address})"

    return _LINK.sub(replaced, text)


def site_target(target: str, *, source: str, here: str, pages: set[str]) -> str | None:
    """What the site puts in place of a link's target; None for a file that is no page of it."""
    path, hash_sign, anchor = target.partition("#")
    if not path or re.match(r"[a-z]+:", target):
        return target
    found = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    page = INCLUDED.get(found, found.removeprefix("docs/"))
    if page in pages:
        return posixpath.relpath(page, posixpath.dirname(here) or ".") + hash_sign + anchor
    return None if (ROOT / found).exists() else target
