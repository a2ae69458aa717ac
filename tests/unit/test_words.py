# SPDX-License-Identifier: Apache-2.0
"""The check of words finds what it is for. `make lint` runs it on this tree."""

from __future__ import annotations

from pathlib import Path

import pytest

import check_words


def found(words: str) -> list[str]:
    text = check_words.Text("page.md:1", words)
    return [offence.rule for offence in check_words.Rules().check(text) if offence.is_failure]


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        ("Nobody is ended.", "avoid 'nobody'"),
        ("It is for whoever asks.", "avoid 'whoever'"),
        ("Room for who needs it.", "avoid 'for who'"),
        ("A slice that is had by a pod.", "avoid 'is had'"),
        ("It goes on. " + "word " * 41, "more than 40 words"),
    ],
)
def test_an_offence_is_found(words: str, rule: str) -> None:
    assert found(words) == [rule]


@pytest.mark.parametrize(
    "words",
    [
        "Idle slices are removed; foreign slices cause an error.",
        "It ends here. " * 20,
        "Users who share a folder trust each other.",
    ],
)
def test_plain_english_passes(words: str) -> None:
    assert found(words) == []


def test_code_in_markdown_is_not_read() -> None:
    page = (
        "Run `nobody` now.\n\n```\nwhoever\n```\n\n| a | `somebody` |\n|---|---|\n| b | whoever |\n"
    )
    texts = list(check_words.markdown_texts("page.md", page))
    assert [text.place.rpartition(":")[2] for text in texts] == ["1", "7", "7", "9", "9"]
    assert [text.words for text in texts] == ["Run `code` now.", "a", "`code`", "b", "whoever"]


def test_messages_and_hints_of_errors_are_read() -> None:
    source = (
        'raise BusyError(f"{name} is "\n  "nobody\'s", hint="ask whoever has it")\nlog("somebody")'
    )
    texts = list(check_words.error_texts("room.py", source))
    assert [text.words for text in texts] == ["ask whoever has it", "… is nobody's"]


def test_comments_of_manifests_and_targets_are_read() -> None:
    manifest = "# One\n# two:\n#   * a\nkey: 1  # not this\n  # three\n"
    texts = check_words.comment_texts("a.yaml", manifest)
    assert [text.words for text in texts] == ["One two:", "* a", "three"]
    (target,) = check_words.target_texts("Makefile", "a: b ## run\n\tc\n")
    assert target.words == "run"


def test_help_texts_are_read() -> None:
    places = {text.place for text in check_words.help_texts()}
    assert {"allot run --help", "allot run --memory", "allot mig plan --help"} <= places


def test_a_new_offence_fails_and_the_baseline_only_shrinks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    baseline = tmp_path / "baseline.txt"
    baseline.write_text("0000 no longer there\n")
    checked = [check_words.Text("page.md:1", "Nobody is ended.")]
    assert check_words.main([], checked=checked, baseline=baseline) == 1
    assert check_words.main(["--shrink"], checked=checked, baseline=baseline) == 1
    assert baseline.read_text() == ""
    assert "page.md:1: avoid 'nobody'" in capsys.readouterr().out


def test_an_offence_of_the_baseline_passes(tmp_path: Path) -> None:
    text = check_words.Text("page.md:1", "Nobody is ended.")
    baseline = tmp_path / "baseline.txt"
    entries = [offence.entry for offence in check_words.Rules().check(text)]
    baseline.write_text("\n".join(entries))
    assert check_words.main([], checked=[text], baseline=baseline) == 0
