# SPDX-License-Identifier: Apache-2.0
"""Holds documents, help texts and messages of errors to plain English (`make lint`).

Rules are in words.yaml. Offences of before are in words-baseline.txt, which may only shrink
(`--shrink`); its entries name texts and not files, so that a file may move. vale would do the same
for Markdown, but it is a Go program to download, and reads neither click commands nor Python.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import yaml
from markdown_it import MarkdownIt
from markdown_it.token import Token

import generate_cli_reference
from allotment import cli

ROOT = Path(__file__).resolve().parent.parent
RULES = ROOT / "tools" / "words.yaml"
BASELINE = ROOT / "tools" / "words-baseline.txt"
_GENERATED = {"docs/reference/cli.md"}
_ROOMS = ("docs", "deploy", "bench", "examples", "native", "tests", "tools")
_SENTENCE_END = re.compile(r"(?<=[.!?])[)\"'*]*\s+(?=[\W_]*[A-Z`\d])")
_SHOWN = 60


@dataclass(frozen=True, slots=True)
class Text:
    """A paragraph, cell, help text or message, and where it is."""

    place: str
    words: str


@dataclass(frozen=True, slots=True)
class Offence:
    """A rule that a sentence breaks."""

    place: str
    rule: str
    advice: str
    sentence: str
    is_failure: bool

    @property
    def entry(self) -> str:
        """Its line of the baseline."""
        digest = hashlib.sha256(self.sentence.encode()).hexdigest()[:12]
        return f"{digest} {self.rule}: {self.sentence[:_SHOWN].strip()}"

    def __str__(self) -> str:
        """Two lines: the rule and the sentence."""
        return f"{self.place}: {self.rule}: {self.advice}\n    {self.sentence}"


class Rules:
    """The rules of words.yaml."""

    def __init__(self, path: Path = RULES) -> None:
        content = yaml.safe_load(path.read_text("utf-8"))
        self._longest = content["sentence_words"]["fail"]
        self._long = content["sentence_words"]["warn"]
        self._patterns = [
            (re.compile(rf"\b(?:{rule['avoid']})\b", re.IGNORECASE), rule["instead"], fails)
            for fails, rules in ((True, content["fail"]), (False, content["warn"]))
            for rule in rules
        ]

    def check(self, text: Text) -> Iterator[Offence]:
        """The offences of one text."""
        for sentence in _SENTENCE_END.split(" ".join(text.words.split())):
            for pattern, instead, fails in self._patterns:
                if match := pattern.search(sentence):
                    rule = f"avoid '{match[0].lower()}'"
                    yield Offence(text.place, rule, f"write {instead}", sentence, fails)
            count = len(re.findall(r"\S*\w\S*", sentence))
            if count > self._long:
                fails = count > self._longest
                limit = self._longest if fails else self._long
                rule = f"more than {limit} words"
                yield Offence(text.place, rule, f"it has {count}", sentence, fails)


def markdown_texts(place: str, content: str) -> Iterator[Text]:
    """The prose of a Markdown document: no code, and one word for each piece of code in a line."""
    for token in MarkdownIt("commonmark").enable("table").parse(content):
        if token.type == "inline" and token.map is not None:
            words = "".join(_prose(child) for child in token.children or [])
            yield Text(f"{place}:{token.map[0] + 1}", words)


def _prose(token: Token) -> str:
    if token.type == "code_inline":
        return "`code`"
    if token.type in {"softbreak", "hardbreak"}:
        return " "
    return token.content if token.type == "text" else ""


def comment_texts(place: str, content: str) -> Iterator[Text]:
    """The paragraphs and list items of comments in YAML."""
    words: list[str] = []
    for number, line in enumerate([*content.splitlines(), ""], start=1):
        is_comment = line.lstrip().startswith("# ")
        comment = line.partition("# ")[2].strip()
        if words and (not is_comment or comment.startswith("* ")):
            yield Text(f"{place}:{number}", " ".join(words))
            words = []
        if is_comment:
            words.append(comment)


def target_texts(place: str, content: str) -> Iterator[Text]:
    """The descriptions of a Makefile's targets, which `make help` shows."""
    for number, line in enumerate(content.splitlines(), start=1):
        if " ## " in line:
            yield Text(f"{place}:{number}", line.partition(" ## ")[2])


def help_texts() -> Iterator[Text]:
    """What the commands say of themselves and of their options."""
    for path, command, _ in generate_cli_reference.commands(cli.main, "allot", None):
        for paragraph in re.split(r"\n\s*\n", f"{command.help or ''}\n\n{command.epilog or ''}"):
            if not paragraph.lstrip(" ").startswith("\b"):
                yield Text(f"{path} --help", paragraph)
        for parameter in command.params:
            if isinstance(parameter, click.Option):
                yield Text(f"{path} {parameter.opts[0]}", parameter.help or "")


def error_texts(place: str, source: str) -> Iterator[Text]:
    """Messages and hints of the errors that Python code raises."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        name = node.func.id if isinstance(node.func, ast.Name) else name
        values = [each.value for each in node.keywords if each.arg == "hint"]
        for value in [*values, *(node.args if name.endswith("Error") else [])]:
            if words := _literal(value):
                yield Text(f"{place}:{value.lineno}", words)


def _literal(node: ast.expr) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_literal(part) or "…" for part in node.values)
    return ""


def texts() -> Iterator[Text]:
    """Everything that is held to the rules."""
    documents = [path for room in _ROOMS for path in sorted((ROOT / room).rglob("*.md"))]
    for path in [*sorted(ROOT.glob("*.md")), *documents]:
        place = path.relative_to(ROOT).as_posix()
        if place not in _GENERATED:
            yield from markdown_texts(place, path.read_text("utf-8"))
    for path in sorted((ROOT / "deploy").rglob("*.yaml")):
        yield from comment_texts(path.relative_to(ROOT).as_posix(), path.read_text("utf-8"))
    yield from target_texts("Makefile", (ROOT / "Makefile").read_text("utf-8"))
    yield from help_texts()
    for path in sorted((ROOT / "src").rglob("*.py")):
        content = path.read_text("utf-8")
        if "Error(" in content or "hint=" in content:
            yield from error_texts(path.relative_to(ROOT).as_posix(), content)


def main(
    arguments: Sequence[str] | None = None,
    *,
    checked: Iterable[Text] | None = None,
    baseline: Path = BASELINE,
) -> int:
    """Print new offences; 1 where one of them is a failure."""
    parser = argparse.ArgumentParser(description="Check documents and messages for plain English.")
    parser.add_argument(
        "--shrink", action="store_true", help="drop what the baseline need not have"
    )
    parser.add_argument("--warn", metavar="PART", help="also print warnings of paths with PART")
    options = parser.parse_args(arguments)
    rules = Rules()
    offences = [offence for text in checked or texts() for offence in rules.check(text)]
    failures = {offence.entry: offence for offence in offences if offence.is_failure}
    known = set(baseline.read_text("utf-8").splitlines())
    if options.shrink:
        baseline.write_text("".join(f"{entry}\n" for entry in sorted(known & failures.keys())))
    fresh = [offence for entry, offence in failures.items() if entry not in known]
    shown = [
        offence
        for offence in offences
        if not offence.is_failure and options.warn and options.warn in offence.place
    ]
    for offence in [*shown, *fresh]:
        print(offence)
    warnings = sum(not offence.is_failure for offence in offences)
    stale = len(known - failures.keys())
    print(
        f"{len(fresh)} failures, {len(known & failures.keys())} in the baseline, "
        f"{warnings} warnings"
        + (f"; {stale} entries of the baseline are not needed (--shrink)" if stale else ""),
        file=sys.stderr,
    )
    return 1 if fresh else 0


if __name__ == "__main__":
    sys.exit(main())
