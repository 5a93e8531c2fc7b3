"""What the parts of `make gpu` left out, each reason once: python tests/gpu/left_out.py FOLDER

Read from the folder's reports of pytest (*.xml), and of benchmarks/gpu.py (gpu-*.json).
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

NOT_REHEARSED = "not rehearsed: "


def reasons(folder: Path) -> Counter[str]:
    """How often each was given."""
    found: Counter[str] = Counter()
    for path in folder.glob("*.xml"):
        root = ElementTree.parse(path).getroot()
        found.update(skipped.get("message", "") for skipped in root.iter("skipped"))
        for named in root.iter("property"):  # of tests that ran, with a stand-in
            if named.get("name") == "not rehearsed":
                found[f"{NOT_REHEARSED}{named.get('value')}"] += 1
    for path in folder.glob("gpu-*.json"):
        rows = json.loads(path.read_text())["rows"]
        found.update(f"{row['skipped']} ({row['method']})" for row in rows if "skipped" in row)
        found.update(f"{NOT_REHEARSED}{what}" for row in rows for what in row.get("not_rehearsed", ()))
    return found


if __name__ == "__main__":
    for reason, count in sorted(reasons(Path(sys.argv[1])).items()):
        print(f"{count:4} {reason}")
