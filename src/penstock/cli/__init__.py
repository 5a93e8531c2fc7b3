"""The command line: one command for each stage, each reading and writing named files.

Exit codes: 0 done, 1 error, 2 wrong usage, 3 infeasible (the budget is too small, or the disk), 130
interrupted.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence

from penstock.cli import output
from penstock.cli.arguments import parser
from penstock.cli.output import DONE, ERROR, INFEASIBLE, INTERRUPTED
from penstock.errors import BudgetTooSmall, PenstockError, SpillSpaceFull


def _dashed(argument: str) -> str:
    """An option may have ``_`` for ``-``, as transformers' scripts have it."""
    name, equals, value = argument.partition("=")
    return f"{name.replace('_', '-')}{equals}{value}" if name.startswith("--") else argument


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, with the arguments of the process when none are given. Returns the exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # what the locale cannot show, as on standard error
    typed = list(sys.argv[1:] if arguments is None else arguments)
    if typed[:1] == ["finetune"]:
        typed = list(map(_dashed, typed))
    options = parser().parse_args(typed)
    if options.command is None:
        options.print_help()
        return DONE
    try:
        output.require_writable(getattr(options, "output", None))
        answer = options.command(options)
        with output.broken_pipe_ignored():
            output.show(answer, as_json=options.json)
        answer.go_on()
    except (BudgetTooSmall, SpillSpaceFull) as error:
        output.show_error(error, as_json=options.json)
        return INFEASIBLE
    except PenstockError as error:
        output.show_error(error, as_json=options.json)
        return ERROR
    except KeyboardInterrupt:
        print("penstock: interrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        if not output.show_script_error(error, as_json=options.json):
            raise
        return ERROR
    if answer.exit_code == INTERRUPTED:
        print("penstock: interrupted", file=sys.stderr)
    return answer.exit_code
