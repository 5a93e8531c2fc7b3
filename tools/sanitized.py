"""Runs a command with a sanitizer in each of its processes, and fails where any of them has a report.

The module is instrumented; Python, torch and all else are not. So the sanitizer's library is loaded first,
by LD_PRELOAD, which a process hands on to its children. Reports are files: output and exit status are lost of
what is killed, and of pytest's workers.

    python tools/sanitized.py tsan build/module-tsan/venv/bin/python -m pytest tests/storage
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

SUPPRESSIONS = Path(__file__).parents[1] / "tests/support/tsan.supp"

# libstdc++ before the module is loaded: the sanitizer looks for what throws when the process starts.
LIBRARIES = {"asan": ("libasan.so", "libstdc++.so.6"), "tsan": ("libtsan.so",)}

OPTIONS = {
    # Python keeps what it has until its process ends, which is no leak. SIGSEGV is the arena's, or the
    # program's.
    "ASAN_OPTIONS": "detect_leaks=0:handle_segv=0:handle_sigbus=0",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    # The longest history: else the other side of a race often has no stack. `make sanitize-tsan` looks for
    # deadlocks: here the detector ends the process once a thread holds 64 locks, and counts destroyed ones.
    "TSAN_OPTIONS": "history_size=7:handle_segv=0:handle_sigbus=0:detect_deadlocks=0"
    f":suppressions={SUPPRESSIONS}",
}


def library(name: str) -> str:
    compiler = os.environ.get("CXX", "c++")
    found = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    path = Path(found.stdout.strip())
    if not path.is_absolute():
        sys.exit(f"{compiler} has no {name}: install its sanitizers")
    return str(path.resolve())


def at_fixed_addresses() -> list[str]:
    """Some systems put memory where the thread sanitizer expects none, unless told to put it where it was."""
    command = ["setarch", "-R"]
    try:
        allowed = subprocess.run([*command, "true"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return []
    return command if allowed else []


def main(sanitizer: str, *command: str) -> int:
    with tempfile.TemporaryDirectory() as folder:
        environment = dict(os.environ, LD_PRELOAD=":".join(map(library, LIBRARIES[sanitizer])))
        environment["PENSTOCK_SANITIZER_REPORTS"] = folder  # tests/conftest.py looks there after each test
        for name, options in OPTIONS.items():
            environment[name] = f"{options}:log_path={folder}/report"
        done = subprocess.run([*at_fixed_addresses(), *command], env=environment, check=False)
        reports = sorted(Path(folder).iterdir())
        for report in reports:
            print(report.read_text(errors="replace"), file=sys.stderr)
        if reports:
            print(f"the sanitizer has reports of {len(reports)} processes: see above", file=sys.stderr)
    return done.returncode or (1 if reports else 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
