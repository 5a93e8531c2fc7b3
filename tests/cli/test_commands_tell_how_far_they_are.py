"""Long commands tell on standard error how far they are, and standard output stays clean."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from penstock import cli
from penstock.cli import output as shown_progress
from penstock.cli import samples as commands
from penstock.cli.output import samples_progress, steps_progress
from penstock.samples.manifest import StoreManifest
from tests.support.stores import write_store


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def store(tmp_path: Path) -> str:
    write_store(tmp_path / "store", [(str(i), b"x" * 100) for i in range(300)])
    return str(tmp_path / "store")


def test_a_terminal_gets_a_bar(store: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    assert cli.main(["samples", "verify", store]) == 0
    assert "verified" in terminal.getvalue() and "300 of 300 samples" in terminal.getvalue()
    assert cli.main(["samples", "unpack", store, str(tmp_path / "out")]) == 0
    assert "unpacked" in terminal.getvalue()
    assert terminal.getvalue().count("300 of 300 samples") >= 2


def test_elsewhere_there_is_a_line_now_and_then(
    store: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["samples", "verify", store]) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(shown_progress, "LINE_S", 0.0)
    assert cli.main(["samples", "verify", store]) == 0
    assert capsys.readouterr().err.startswith("verified 300 of 300 samples, ")


def test_json_comes_without_any(
    store: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shown_progress, "LINE_S", 0.0)
    assert cli.main(["samples", "verify", store, "--json"]) == 0
    shown = capsys.readouterr()
    assert shown.err == "" and json.loads(shown.out)["sound"]


def test_the_rate_is_that_of_this_run_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now_s = [0.0]
    monkeypatch.setattr(shown_progress.time, "monotonic", lambda: now_s[0])
    with samples_progress("packed", None, None, quiet=False) as progress:
        assert progress is not None
        progress(1000, 5_000_000_000)  # an earlier run's
        now_s[0] = 10.0
        progress(1100, 5_000_000_100)
    assert "packed 1,100 samples, 4.66 GiB, 10 B/s" in capsys.readouterr().err


def test_interrupted_packing_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any, **__: Any) -> StoreManifest:
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "pack_source", interrupted)
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "file").write_bytes(b"x")
    assert cli.main(["samples", "pack", str(tmp_path / "tree"), str(tmp_path / "store")]) == 130
    assert "the same command goes on where this one was stopped" in capsys.readouterr().err


def test_steps_are_a_bar_on_a_terminal_and_a_line_now_and_then_elsewhere(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def train() -> None:
        with steps_progress("recording", 2) as show:
            for step in (1, 2):
                show(step, 0.5, lambda: "3 ms a step")

    train()
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(shown_progress, "LINE_S", 0.0)
    train()
    lines = "step 1 of 2, loss 0.5000, 3 ms a step\nstep 2 of 2, loss 0.5000, 3 ms a step\n"
    assert capsys.readouterr().err == lines
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    train()
    for said in ("recording", "100%", "step 2 of 2, loss 0.5000, 3 ms a step"):
        assert said in terminal.getvalue()
