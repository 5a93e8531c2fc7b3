"""tools/sanitized.py fails where a sanitizer has a report, in whichever process, and only there."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SANITIZED = Path(__file__).parents[2] / "tools/sanitized.py"
FLAGS = {"asan": "address", "tsan": "thread"}

LIBRARY = """
#include <thread>

static int number;

static void count() { for (int i = 0; i < 1000; ++i) ++number; }

extern "C" int take_turns() {
  std::thread(count).join();
  count();
  return number;
}

extern "C" int race() {
  std::thread other(count);
  count();
  other.join();
  return number;
}

extern "C" int read(int place) {
  auto* const bytes = new char[8]();
  const volatile auto byte = bytes[place];
  delete[] bytes;
  return byte;
}
"""

# A child has the report, ends as if nothing were, and its output is lost.
PROGRAM = """
import subprocess, sys
child = "import ctypes, os; ctypes.CDLL({library!r}).{call}; os._exit(0)"
subprocess.run([sys.executable, "-c", child], capture_output=True)
"""


@pytest.mark.parametrize(
    ("sanitizer", "call", "report"),
    [
        ("tsan", "take_turns()", ""),
        ("tsan", "race()", "data race"),
        ("asan", "read(7)", ""),
        ("asan", "read(8)", "heap-buffer-overflow"),
    ],
)
def test_a_report_of_a_child_does(sanitizer: str, call: str, report: str, tmp_path: Path) -> None:
    if shutil.which("c++") is None:
        pytest.skip("needs a C++ compiler with its sanitizers")
    source, library = tmp_path / "library.cpp", tmp_path / "library.so"
    source.write_text(LIBRARY)
    flags = ["-g1", "-O1", "-fPIC", "-shared", f"-fsanitize={FLAGS[sanitizer]}"]
    subprocess.run(["c++", *flags, source, "-o", library], check=True)
    program = PROGRAM.replace("{library!r}", repr(str(library))).replace("{call}", call)
    done = subprocess.run(
        [sys.executable, SANITIZED, sanitizer, sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == bool(report), done.stderr
    assert report in done.stderr
    if not report:
        assert not done.stderr
