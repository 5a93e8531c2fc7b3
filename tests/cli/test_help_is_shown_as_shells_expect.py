"""What is asked for help, what its options are grouped in, and how a command ends that cannot be typed."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Iterator

import pytest

from penstock import cli
from penstock.cli.arguments import parser


def commands(
    of: argparse.ArgumentParser, words: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], argparse.ArgumentParser]]:
    below = [action for action in of._actions if isinstance(action, argparse._SubParsersAction)]
    if not below:
        yield words, of
    for action in below:
        for name, command in action.choices.items():
            yield from commands(command, (*words, name))


COMMANDS = dict(commands(parser()))


@pytest.mark.parametrize("words", [(), ("samples",), ("checkpoint",)])
def test_without_a_command_the_help_is_shown(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == 0
    shown = capsys.readouterr()
    assert "commands:" in shown.out and not shown.err


@pytest.mark.parametrize("arguments", [("nope",), ("plan",), ("samples", "nope"), ("ls", "--nope")])
def test_what_cannot_be_typed_exits_with_2(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refusal:
        cli.main(arguments)
    assert refusal.value.code == 2
    assert "usage: penstock" in capsys.readouterr().err


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_command_ends_with_an_example_that_can_be_typed(words: tuple[str, ...]) -> None:
    _, _, examples = COMMANDS[words].format_help().partition("\nexample:\n")
    examples = examples.replace("\\\n", "")
    assert examples.startswith(f"  penstock {' '.join(words)} ") and examples.count("\n") == 1
    assert parser().parse_args(shlex.split(examples)[1:]).command is not None


@pytest.mark.parametrize("command", ["trace", "run"])
def test_scripts_are_said_to_be_imported(command: str) -> None:
    assert 'The script is imported, so put its own training under `if __name__ == "__main__":`' in " ".join(
        COMMANDS[command,].format_help().split()
    )


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_options_are_called_the_same_everywhere(words: tuple[str, ...]) -> None:
    command = COMMANDS[words]
    typed = {name for action in command._actions for name in action.option_strings}
    assert not typed & {"--seconds", "--force"}
    text = command.format_help()
    assert "?." not in text
    assert len(command.format_usage()) < 1500 and "evict_all" not in command.format_usage()


def test_long_lists_of_options_are_in_groups() -> None:
    for words, command in COMMANDS.items():
        for group in command._action_groups:
            assert len(group._group_actions) <= 15, (words, group.title)


def test_the_format_of_iterables_is_only_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["samples", "pack", "a", "b", "--format", "iterable"])
    assert re.search("invalid choice: .iterable", capsys.readouterr().err)
