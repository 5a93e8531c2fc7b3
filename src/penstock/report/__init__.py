"""What a run leaves behind: a folder of named files, and the same as a value."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.core import files
from penstock.core.hardware import Hardware
from penstock.core.plan import Plan
from penstock.core.timeline import Timeline
from penstock.core.trace import Trace
from penstock.errors import InvalidFile, PenstockError
from penstock.runtime.report import NO_POLICY, Report
from penstock.simulator import simulate

if TYPE_CHECKING:
    from penstock.runtime.run import Offload

# The files of a folder, by field of Record.
FILES: dict[str, tuple[str, type]] = {
    "trace": ("trace.json.gz", Trace),
    "hardware": ("hardware.json", Hardware),
    "report": ("report.json", Report),
    "plan": ("plan.json", Plan),
    "measured": ("timeline.json.gz", Timeline),
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Record:
    """One run: what it was, what was planned, and what happened.

    plan       None where none could be made, and least recent use decided
    measured   the last recorded step that followed a plan; None where the run was too short for one
    """

    trace: Trace
    hardware: Hardware
    report: Report
    plan: Plan | None = None
    measured: Timeline | None = None

    @property
    def predicted(self) -> Timeline:
        """What the simulator says of the plan. Raises PenstockError where there is none."""
        if self.plan is None:
            raise PenstockError("no plan could be made for this run: nothing was predicted")
        return simulate(self.trace, self.plan, self.hardware)

    @classmethod
    def of(cls, run: Offload) -> Record:
        """Of a run so far. Raises PenstockError before its first step has ended."""
        report = run.report()
        assert run.trace is not None, "there is a report"
        return cls(
            trace=run.trace, hardware=run.hardware, plan=run.plan, report=report, measured=run.timeline
        )

    def save(self, folder: str | Path) -> list[Path]:
        """Write one file for each value into ``folder``, which is made where missing. Returns the files."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        written = []
        for field, (name, _) in FILES.items():
            value = getattr(self, field)
            if isinstance(value, Plan):
                value = replace(value, trace=None)  # it has a file of its own
            if value is None:
                (folder / name).unlink(missing_ok=True)  # of an earlier run in this folder
            else:
                files.save(value, folder / name)
                written.append(folder / name)
        return written

    @classmethod
    def load(cls, folder: str | Path) -> Record:
        """Read what `save` wrote. Raises InvalidFile where a file is missing or something else."""
        folder = Path(folder)
        if not folder.is_dir():
            raise PenstockError(f"{folder} is not a folder: give the one that `penstock run -o` wrote")
        values: dict[str, Any] = {}
        for field, (name, kind) in FILES.items():
            if (folder / name).exists():
                values[field] = files.load(kind, folder / name)
            elif field != "measured" and not (field == "plan" and values["report"].policy == NO_POLICY):
                raise InvalidFile(f"{folder} has no {name}: give a folder that `penstock run -o` wrote")
        return cls(**values)
