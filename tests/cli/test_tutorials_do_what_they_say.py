"""Each tutorial, from top to bottom: its code runs, and prints what the page shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.pages import Reader

TUTORIALS = Path(__file__).parents[2] / "docs" / "tutorials"
PAGES = sorted(path.stem for path in TUTORIALS.glob("*.md"))
LONG = {"budget-and-disk", "hugging-face", "reading-a-report", "several-processes"}


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.slow] * (page in LONG)) for page in PAGES]
)
def test_a_reader_gets_what_the_page_shows(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if page in ("killed-and-resumed", "object-stores"):
        request.getfixturevalue("s3")
    if page == "hugging-face":
        pytest.importorskip("transformers")
        pytest.importorskip("accelerate")
    monkeypatch.chdir(tmp_path)
    Reader(TUTORIALS / f"{page}.md").read()


SOUND = """
```python title="greet.py"
print("hello", 3)
```
```python
number = 2
```
```python
print(f"took {number} ms")
```
<!-- figures vary -->
```text
took 1.5 s
```
<!-- checksums vary -->
```console
$ echo 01ab23cd of b
89abcdef of b
```
<!-- exit code 2 -->
```console
$ python greet.py
hello ...
$ python greet.py && exit 2
hello 3
```
"""


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("", ""),
        ("number = 2", "numbr = 2"),
        ("took 1.5 s", "takes 1.5 s"),
        ("hello 3", "hello 4"),
        ("exit 2", "exit 3"),
        ("89abcdef of b", "89abcdef of c"),
        ("<!-- checksums vary -->\n", ""),
        ("```console", "```consol"),
    ],
)
def test_a_page_that_is_wrong_fails(
    right: str, wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    page = tmp_path / "page.md"
    page.write_text(SOUND.replace(right, wrong) if right else SOUND)
    if not right:
        Reader(page).read()
        return
    with pytest.raises((AssertionError, NameError)):
        Reader(page).read()
