# SPDX-License-Identifier: Apache-2.0
"""Every error that ends a command has a documented exit code."""

from allotment.cli.burn import EXIT_OUT_OF_MEMORY
from allotment.cli.groups import CLOSED_PIPE
from allotment.model import errors


def _all(kind: type[errors.AllotError]) -> set[type[errors.AllotError]]:
    return {kind}.union(*(_all(each) for each in kind.__subclasses__()))


def test_every_exit_code_is_documented() -> None:
    ours = {each for each in _all(errors.AllotError) if each.__module__ == errors.__name__}
    of_no_error = {0, EXIT_OUT_OF_MEMORY, CLOSED_PIPE}
    assert {each.exit_code for each in ours} | of_no_error == set(errors.EXIT_CODES)


def test_the_tree_in_the_prologue_names_every_class() -> None:
    missing = {"CommandNotExecutableError", "CommandNotFoundError"}
    classes = {each.__name__ for each in _all(errors.AllotError)} & vars(errors).keys()
    for name in classes - missing:
        assert name in (errors.__doc__ or "")
