"""The command that checks the machine. Returns an Answer; nothing is printed here.

It works without torch and without the compiled module: nothing else is imported with it.
"""

from __future__ import annotations

import dataclasses
import logging
from argparse import Namespace

from penstock.capture.doctor import FINE, Finding, examine, usable
from penstock.cli.output import DONE, ERROR, Answer, Table, printable


def doctor(options: Namespace) -> Answer:
    logging.getLogger("penstock").addHandler(logging.NullHandler())  # the findings have its warnings
    findings = examine(options.spill_dir or [])
    works = usable(findings)
    rows = [row for finding in findings for row in _rows(finding)]
    return Answer(
        values={"usable": works, "findings": [dataclasses.asdict(finding) for finding in findings]},
        shown=[Table((), rows), "penstock works here" if works else "penstock does not work here"],
        exit_code=DONE if works else ERROR,
    )


def _rows(finding: Finding) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [(finding.state, finding.name, printable(finding.found))]
    if finding.state != FINE:
        rows += [("", "", f"it costs: {finding.cost}"), ("", "", f"fix it: {finding.remedy}")]
    return rows
