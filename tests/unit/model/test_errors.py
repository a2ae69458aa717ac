# SPDX-License-Identifier: Apache-2.0
"""Every error that ends a command has a documented exit code."""

from allotment.model import errors


def _all(kind: type[errors.AllotError]) -> set[type[errors.AllotError]]:
    return {kind}.union(*(_all(each) for each in kind.__subclasses__()))


def test_every_exit_code_is_documented() -> None:
    ours = {each for each in _all(errors.AllotError) if each.__module__ == errors.__name__}
    assert {each.exit_code for each in ours} | {0} == set(errors.EXIT_CODES)


def test_the_tree_in_the_prologue_names_every_class() -> None:
    missing = {"CommandNotExecutableError", "CommandNotFoundError"}
    for name in set(errors.__all__) - {"EXIT_CODES"} - missing:
        assert name in (errors.__doc__ or "")
