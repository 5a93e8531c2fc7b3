"""`penstock doctor` tries what training stands on: what it says is so, in any state the machine is in."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock import cli
from penstock.machine import container_available_bytes, container_bytes
from penstock.runtime import arena

Findings = dict[str, dict[str, str]]

RAM = Path("/dev/shm")
in_ram = pytest.mark.skipif(not RAM.is_dir(), reason="there is no directory in RAM")

# A process in a container of its own, as far as that goes without one.
HOSTILE = """
import ctypes, json, platform, resource, struct, sys
library = ctypes.CDLL(None, use_errno=True)

def refuse(number):
    # A filter of system calls: load the number; if it is this one, EPERM; else allow.
    code = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)]
    program = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *each) for each in code))
    header = struct.pack("@HxxxxxxP", len(code), ctypes.addressof(program))
    assert library.prctl(38, 1, 0, 0, 0) == 0, "no new privileges"
    assert library.prctl(22, 2, ctypes.create_string_buffer(header), 0, 0) == 0, "seccomp"

refuse(425)  # io_uring_setup
assert library.prctl(41, 1, 0, 0, 0) == 0, "no huge pages"
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))
sys.exit(__import__("penstock.cli").cli.main(["doctor", "--json"]))
"""


def examined(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Findings, dict[str, Any]]:
    code = cli.main(["doctor", "--json", *arguments])
    return code, *read(capsys.readouterr().out)


def read(text: str) -> tuple[Findings, dict[str, Any]]:
    answer = json.loads(text)
    findings = {finding["name"]: finding for finding in answer["findings"]}
    for finding in answer["findings"]:
        assert finding["found"]
        assert bool(finding["cost"]) == bool(finding["remedy"]) == (finding["state"] != "fine"), finding
    return findings, answer


def test_where_penstock_works_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, findings, answer = examined(capsys, "--spill-dir", str(tmp_path))
    assert (code, answer["usable"]) == (0, True), "these tests train here"
    assert {"Python", "torch", "arena", "huge pages", "memory", "io_uring", "posix", "cuFile"} <= set(
        findings
    )
    assert findings["arena"]["state"] == ("fine" if arena.unavailable() is None else "costs")
    assert str(tmp_path) in findings["spill directory"]["found"]
    assert findings["posix"]["state"] == "fine"
    assert not list(tmp_path.iterdir()), "nothing is left behind"


def test_the_page_names_states_costs_and_remedies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--spill-dir", str(tmp_path / "missing")]) == 1
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    said = f"tensors cannot be spilled to {tmp_path / 'missing'}: No such file or directory"
    begin = lines.index(f"fails spill directory {said}")
    assert lines[begin + 1] == "it costs: penstock cannot train here"
    assert lines[begin + 2].startswith("fix it: give --spill-dir")
    assert lines[-1] == "penstock does not work here"
    assert not any("io_uring" in line for line in lines), "there is nowhere to try it"


@in_ram
def test_a_spill_directory_in_memory_costs(capsys: pytest.CaptureFixture[str]) -> None:
    code, findings, _ = examined(capsys, "--spill-dir", str(RAM))
    assert code == 0
    assert findings["spill directory"]["state"] == findings["direct I/O"]["state"] == "costs"
    assert "tmpfs" in findings["direct I/O"]["found"]


@in_ram
def test_what_is_refused_is_found_by_trying() -> None:
    """System calls, huge pages, limits and the arena, all taken from one process; TMPDIR in RAM."""
    environment = {
        "PENSTOCK_ARENA": "0",
        "TMPDIR": str(RAM),
        "CUDA_VISIBLE_DEVICES": "",
        "PATH": "/usr/bin:/bin",
    }
    ended = subprocess.run(
        [sys.executable, "-c", HOSTILE], capture_output=True, text=True, check=False, env=environment
    )
    assert ended.returncode == 1, ended.stderr
    findings, answer = read(ended.stdout)
    assert not answer["usable"]
    assert (findings["arena"]["state"], findings["arena"]["remedy"]) == ("fails", "unset PENSTOCK_ARENA")
    assert findings["io_uring"]["state"] == "costs"
    assert "Operation not permitted" in findings["io_uring"]["found"]
    assert "io_uring_setup" in findings["io_uring"]["remedy"]
    assert findings["posix"]["state"] == "fine"
    assert findings["huge pages"]["state"] == "costs"
    assert (findings["open files"]["state"], findings["open files"]["remedy"]) == ("costs", "ulimit -n 1024")
    assert findings["address space"]["state"] == "costs"
    assert "is in RAM" in findings["temporary files"]["found"]
    assert findings["spill directory"]["found"].startswith("/var/tmp")


@pytest.mark.parametrize(("module", "name"), [("penstock._native", "compiled module"), ("torch", "torch")])
def test_what_cannot_be_imported_is_named(module: str, name: str) -> None:
    program = f"import sys; sys.modules[{module!r}] = None\nfrom penstock.cli import main"
    ended = subprocess.run(
        [sys.executable, "-c", f"{program}\nsys.exit(main(['doctor', '--json']))"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1, ended.stderr
    findings, _ = read(ended.stdout)
    assert findings[name]["state"] == "fails" and "install" in findings[name]["remedy"]
    assert list(findings)[-1] == name, "nothing that stands on it is tried"


def limits(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    return root


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/\n", {"memory.max": "max"}, None),
        ("0::/\n", {"memory.max": "1000"}, 1000),
        ("0::/a/b\n", {"a/memory.max": "700", "a/b/memory.max": "max"}, 700),
        ("0::/a/b\n", {"a/memory.max": "700", "a/b/memory.max": "600"}, 600),
        ("0::/a/b\n", {"a/memory.max": "700", "a/memory.high": "650", "a/b/memory.max": "max"}, 650),
        ("0::/../other\n", {"memory.max": "500"}, 500),
        ("5:memory:/a\n0::/a\n", {"memory/a/memory.limit_in_bytes": "400"}, 400),
        ("5:cpu,memory:/of/the/host\n", {"memory/memory.limit_in_bytes": "300"}, 300),
        ("5:memory:/\n", {"memory/memory.limit_in_bytes": "9223372036854771712"}, None),
        ("5:cpu:/\n", {"memory/memory.limit_in_bytes": "300"}, None),
        ("", {}, None),
    ],
)
def test_the_containers_limit_is_read(
    groups: str, files: dict[str, str], expected: int | None, tmp_path: Path
) -> None:
    (tmp_path / "cgroup").write_text(groups)
    assert container_bytes(tmp_path / "cgroup", limits(tmp_path / "root", files)) == expected


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/\n", {"memory.max": "max", "memory.current": "10"}, None),
        ("0::/\n", {"memory.max": "1000"}, 1000),
        ("0::/\n", {"memory.max": "1000", "memory.current": "900"}, 100),
        ("0::/\n", {"memory.max": "1000", "memory.current": "1100"}, 0),
        (
            "0::/\n",
            {
                "memory.max": "1000",
                "memory.current": "900",
                "memory.stat": "anon 500\nfile 400\ninactive_file 200\nactive_file 100\nshmem 100",
            },
            400,
        ),
        (
            "0::/a/b\n",
            {
                "a/memory.max": "700",
                "a/memory.current": "650",
                "a/b/memory.max": "600",
                "a/b/memory.current": "10",
            },
            50,
        ),
        (
            "5:memory:/a\n",
            {
                "memory/a/memory.limit_in_bytes": "400",
                "memory/a/memory.usage_in_bytes": "300",
                "memory/a/memory.stat": "inactive_file 1\ntotal_inactive_file 80\ntotal_active_file 20",
            },
            200,
        ),
    ],
)
def test_what_the_container_has_left_is_read(
    groups: str, files: dict[str, str], expected: int | None, tmp_path: Path
) -> None:
    (tmp_path / "cgroup").write_text(groups)
    assert container_available_bytes(tmp_path / "cgroup", limits(tmp_path / "root", files)) == expected
