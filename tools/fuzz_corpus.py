"""Inputs of the fuzz targets: lines of hexadecimal digits in the repository, files for libFuzzer.

python tools/fuzz_corpus.py expand csrc/tests/fuzz/corpus/TARGET.txt FOLDER
python tools/fuzz_corpus.py gather csrc/tests/fuzz/corpus/TARGET.txt FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path


def expand(lines: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number, line in enumerate(lines.read_text().splitlines()):
        (folder / f"known-{number}").write_bytes(bytes.fromhex(line))


def gather(lines: Path, folder: Path) -> None:
    found = sorted({file.read_bytes() for file in folder.iterdir()}, key=lambda data: (len(data), data))
    lines.write_text("".join(f"{data.hex()}\n" for data in found))


if __name__ == "__main__":
    what, lines, folder = sys.argv[1:]
    {"expand": expand, "gather": gather}[what](Path(lines), Path(folder))
