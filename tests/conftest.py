from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

# Tests run side by side, on small tensors: threads would only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import HealthCheck, settings

import penstock
from penstock.runtime import open_runs, step_planner
from tests.support.object_servers import S3, Proxy, shared_seaweed

# Where everybody waits for the result, the same examples each time, and fewer; at a desk, new ones. No test
# says how fast a machine is.
settings.register_profile("desk", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("desk"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "desk")


@pytest.fixture
def hardware() -> penstock.Hardware:
    """A machine whose rates are given, so that no test waits for a measurement."""
    return penstock.Hardware(
        device_bytes=1 << 40,
        disk_bytes=8 << 30,
        disk_read_bytes_per_s=2e9,
        disk_write_bytes_per_s=2e9,
        disk_read_latency_s=1e-4,
        disk_write_latency_s=1e-4,
        disk_shares_bus=False,
        name="given",
    )


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    """A server that speaks S3, one for the whole session."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # which all workers share
    with shared_seaweed(folder) as server:
        yield server


@pytest.fixture
def s3(seaweed: S3, monkeypatch: pytest.MonkeyPatch) -> S3:
    """The same, with this test's environment leading there."""
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL_S3", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    for name, value in seaweed.environment.items():
        monkeypatch.setenv(name, value)
    return seaweed


@pytest.fixture
def proxy(s3: S3, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """Between this test and the same server."""
    with Proxy(s3.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        yield proxy


FOLDERS = (
    ("checkpoint", "cli", "codecs", "device", "distributed", "docs", "gpu", "integrations")
    + ("nvme", "planning", "report", "runtime", "samples", "storage")
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test's folder is its marker."""
    for item in items:
        folder = item.path.relative_to(Path(__file__).parent).parts[0]
        if folder in FOLDERS:
            item.add_marker(folder)
    # The longest begin first, so that no process is alone with one at the end; then those that fork the most,
    # while their process is small.
    first = {"distributed": 0, "model": 0, "stress": 0, "samples": 1}
    items.sort(key=lambda item: first.get(item.path.parent.name, 2))
    if os.environ.get("CI"):
        take_fewer_examples(items)


def take_fewer_examples(items: list[pytest.Item]) -> None:
    """A third of what each test of hypothesis asks for: the same ones again find nothing new."""
    done = set()
    for item in items:
        test = getattr(item, "obj", None)
        for holder, name in (
            (getattr(test, "__func__", test), "_hypothesis_internal_use_settings"),
            (getattr(item, "cls", None), "settings"),  # of a state machine
        ):
            found = getattr(holder, name, None)
            if isinstance(found, settings) and id(holder) not in done:
                done.add(id(holder))
                setattr(
                    holder,
                    name,
                    settings(found, max_examples=min(found.max_examples, max(5, found.max_examples // 3))),
                )


def pytest_collection_finish() -> None:
    """What was imported stays: each run looks for garbage when it begins, and need not look there."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_run_stays_open() -> Iterator[None]:
    """A test that fails amid a run leaves the next one a thread of its own."""
    yield
    for left in list(open_runs.opened):
        left.close()
    if open_runs.lingering:  # their tensors are gone with the test
        gc.collect()
        for left in tuple(open_runs.lingering):
            left._give_back()


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C reaches this process and its children, also where the shell that runs the tests ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def steps_are_planned_in_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What steps of milliseconds compute does not depend on how good their plans are."""
    least_s, most_s = step_planner.PLANNING_LIMITS_S
    monkeypatch.setattr(step_planner, "PLANNING_LIMITS_S", (least_s / 10, most_s))


@pytest.fixture(autouse=True)
def no_sanitizer_reports() -> Iterator[None]:
    """Under tools/sanitized.py: what is reported while a test runs is the test's, or of one beside it."""
    folder = os.environ.get("PENSTOCK_SANITIZER_REPORTS")
    before = sizes_of(folder)
    yield
    reported = {path for path, size_bytes in sizes_of(folder).items() if size_bytes != before.get(path)}
    assert not reported, "the sanitizer has a report: " + ", ".join(map(str, sorted(reported)))


def sizes_of(folder: str | None) -> dict[Path, int]:
    return {path: path.stat().st_size for path in Path(folder).iterdir()} if folder else {}


@pytest.fixture(autouse=True)
def deterministic() -> None:
    torch.manual_seed(0)
