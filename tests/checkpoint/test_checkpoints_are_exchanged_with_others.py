"""Files go to and come from torch and safetensors, in Python and on the command line."""

from __future__ import annotations

import json
import logging
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

import penstock
from penstock import checkpoint, cli
from penstock.checkpoint import contents, loading
from tests.support.families import FAMILIES
from tests.support.states import STATES, numbers, same, trained_gpt

FLAT = {
    "weight": numbers(3000).view(50, 60),
    "odd": numbers(7, torch.uint8),
    "half": numbers(9, torch.bfloat16),
}


# -- safetensors ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "state", [FLAT, {}, {"empty": torch.empty(0, 3)}, FAMILIES["cnn"].make().state_dict()], ids=range(4)
)
def test_safetensors_reads_what_penstock_wrote(state: dict[str, torch.Tensor], tmp_path: Path) -> None:
    checkpoint.save(state, tmp_path / "state.safetensors")
    loaded = safetensors.torch.load_file(tmp_path / "state.safetensors")
    assert loaded.keys() == state.keys()
    assert all(same(loaded[name], tensor) for name, tensor in state.items())


@pytest.mark.parametrize("name", STATES)
def test_safetensors_opens_every_state(name: str, tmp_path: Path) -> None:
    checkpoint.save(STATES[name](), tmp_path / "state", metadata={"run": "17"})
    with safetensors.safe_open(tmp_path / "state", "pt") as file:
        assert file.metadata()["run"] == "17"
        info = checkpoint.info(tmp_path / "state")
        assert set(file.keys()) == {tensor.name for tensor in info.tensors}
        for tensor in info.tensors:
            assert file.get_slice(tensor.name).get_dtype() == tensor.dtype


@pytest.mark.parametrize(
    "loader", ["accelerate.utils.modeling:load_state_dict", "transformers.modeling_utils:load_state_dict"]
)
def test_loaders_of_others_read_what_penstock_wrote(loader: str, tmp_path: Path) -> None:
    module, _, name = loader.partition(":")
    checkpoint.save(FLAT, tmp_path / "model.safetensors", metadata={"run": "17"})
    loaded = getattr(pytest.importorskip(module), name)(str(tmp_path / "model.safetensors"))
    assert loaded.keys() == FLAT.keys() and all(same(loaded[key], FLAT[key]) for key in FLAT)
    assert checkpoint.info(tmp_path / "model.safetensors").metadata == {"run": "17"}


def test_transformers_and_accelerate_load_a_model_that_penstock_saved(tmp_path: Path) -> None:
    transformers, accelerate = pytest.importorskip("transformers"), pytest.importorskip("accelerate")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config)
    config.save_pretrained(tmp_path)
    checkpoint.save(model.state_dict(), tmp_path / "model.safetensors")
    with accelerate.init_empty_weights():
        empty = transformers.LlamaForCausalLM(config)
    dispatched = accelerate.load_checkpoint_and_dispatch(empty, tmp_path, device_map={"": "cpu"})
    for other in (transformers.LlamaForCausalLM.from_pretrained(tmp_path), dispatched):
        assert all(same(other.state_dict()[key], tensor) for key, tensor in model.state_dict().items())


def test_files_without_the_format_of_torch_are_read_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contents, "FOR_TORCH", {})
    checkpoint.save(FLAT, tmp_path / "state")
    with safetensors.safe_open(tmp_path / "state", "pt") as file:
        assert "format" not in file.metadata()
    assert checkpoint.verify(tmp_path / "state").checksummed
    assert all(same(tensor, FLAT[name]) for name, tensor in checkpoint.load(tmp_path / "state").items())


@pytest.mark.parametrize("mmap", [True, False, None])
def test_penstock_reads_what_safetensors_wrote(
    mmap: bool | None, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "_logged_foreign", False)
    path = tmp_path / "state.safetensors"
    safetensors.torch.save_file(FLAT, path, metadata={"run": "17"})
    with caplog.at_level(logging.WARNING, "penstock"):
        for _ in range(2):
            loaded = checkpoint.load(path, mmap=mmap)
    assert loaded.keys() == FLAT.keys() and all(same(loaded[name], FLAT[name]) for name in FLAT)
    assert [record.levelname for record in caplog.records] == ["WARNING"], "once"
    assert "no checksums" in caplog.text
    info = checkpoint.verify(path)
    assert (info.format, info.checksummed, info.metadata) == ("safetensors", False, {"run": "17"})


@pytest.mark.parametrize("mmap", [True, False])
def test_tensors_that_do_not_begin_at_a_multiple_of_their_element(mmap: bool, tmp_path: Path) -> None:
    """safetensors' own writer avoids them; the format does not."""
    header = {
        "a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
        "b": {"dtype": "F64", "shape": [2], "data_offsets": [3, 19]},
    }
    text = json.dumps(header).encode()
    numbers_ = torch.tensor([1.5, -2.0], dtype=torch.float64)
    data = b"abc" + numbers_.numpy().tobytes()
    (tmp_path / "state").write_bytes(len(text).to_bytes(8, "little") + text + data)
    loaded = checkpoint.load(tmp_path / "state", mmap=mmap)
    assert torch.equal(loaded["b"], numbers_) and loaded["b"].data_ptr() % 8 == 0
    into = {"a": torch.zeros(3, dtype=torch.uint8), "b": torch.zeros(2, dtype=torch.float64)}
    assert torch.equal(checkpoint.load(tmp_path / "state", mmap=mmap, into=into)["b"], numbers_)


# -- torch ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mmap", [None, True, False])
@pytest.mark.parametrize("name", ["weights", "tied weights", "adamw", "lists", "ordered", "views"])
def test_penstock_reads_what_torch_wrote(name: str, mmap: bool | None, tmp_path: Path) -> None:
    state = STATES[name]()
    torch.save(state, tmp_path / "state.pt")
    assert same(checkpoint.load(tmp_path / "state.pt", mmap=mmap), state)
    assert same(checkpoint.load(tmp_path / "state.pt", "cpu", mmap), state)


def test_a_module_is_filled_from_what_torch_wrote(tmp_path: Path) -> None:
    model, other = FAMILIES["gpt"].make(), FAMILIES["gpt"].make()
    torch.save(model.state_dict(), tmp_path / "state.pt")
    assert checkpoint.load(tmp_path / "state.pt", into=other) is other
    assert same(other.state_dict(), model.state_dict())
    with pytest.raises(penstock.InvalidArgument, match="does not fit"):
        checkpoint.load(tmp_path / "state.pt", into=torch.nn.Linear(2, 2))


def test_code_in_a_file_of_torch_is_not_run(tmp_path: Path) -> None:
    torch.save({"a": FLAT, "path": Path("somewhere")}, tmp_path / "state.pt")
    with pytest.raises(penstock.InvalidFile, match=r"pathlib.*code in a file is not run.*weights_only=False"):
        checkpoint.load(tmp_path / "state.pt")


def test_damaged_files_of_torch_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    torch.save(FLAT, path)
    sound = path.read_bytes()
    info = checkpoint.verify(path)
    assert (info.format, info.checksummed, {tensor.name for tensor in info.tensors}) == (
        "torch",
        True,
        set(FLAT),
    )
    for cut in (40, len(sound) // 2, len(sound) - 1):
        path.write_bytes(sound[:cut])
        for read in (checkpoint.load, checkpoint.info, checkpoint.verify):
            with pytest.raises(penstock.InvalidFile):
                read(path)
    with zipfile.ZipFile(tmp_path / "sound.pt", "w") as other:
        other.writestr("archive/data.pkl", "no state")
    with pytest.raises(penstock.InvalidFile, match=r"sound\.pt"):
        checkpoint.load(tmp_path / "sound.pt")
    changed = bytearray(sound)
    changed[sound.index(FLAT["weight"].numpy().tobytes())] ^= 1
    path.write_bytes(changed)
    with pytest.raises(penstock.InvalidFile, match=r"its member .*data/0"):
        checkpoint.verify(path)


def test_zip_files_of_others_are_not_called_damaged(tmp_path: Path) -> None:
    np.savez(tmp_path / "arrays.npz", weight=np.ones(3))
    said = r"arrays\.npz is not a checkpoint: it is a zip file"
    with pytest.raises(penstock.InvalidFile, match=said) as error:
        checkpoint.load(tmp_path / "arrays.npz")
    assert "damaged" not in str(error.value)


@pytest.mark.parametrize("mmap", [True, False, None])
def test_a_flipped_bit_in_a_file_of_torch_save_is_found(mmap: bool | None, tmp_path: Path) -> None:
    path = tmp_path / "state.pt"
    state = {"weight": numbers(1000), "bias": numbers(10)}
    torch.save(state, path)
    data = bytearray(path.read_bytes())
    data[data.index(numbers(1000).numpy().tobytes()) + 1] ^= 4
    path.write_bytes(data)
    target = {"weight": torch.zeros(1000), "bias": torch.zeros(10)}
    for load in (
        lambda: checkpoint.load(path, mmap=mmap),
        lambda: checkpoint.load(path, mmap=mmap, into=target),
        lambda: checkpoint.convert(path, tmp_path / "state.safetensors"),
    ):
        with pytest.raises(penstock.InvalidFile, match=r"checksum of its member state/data/0 .*verify=False"):
            load()
    assert not any(tensor.any() for tensor in target.values()), "it is verified before anything changes"
    assert not (tmp_path / "state.safetensors").exists()
    loaded = checkpoint.load(path, mmap=mmap, verify=False)
    assert same(loaded["bias"], state["bias"]) and not same(loaded["weight"], state["weight"])


def test_a_file_that_torch_saved_without_checksums_is_loaded(tmp_path: Path) -> None:
    computes = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(FLAT, tmp_path / "state.pt")
    finally:
        torch.serialization.set_crc32_options(computes)
    assert same(checkpoint.load(tmp_path / "state.pt"), FLAT)
    assert not checkpoint.verify(tmp_path / "state.pt").checksummed


# -- conversion -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["weights", "tied weights", "adamw", "lists", "ordered", "views", "strides"])
def test_conversion_there_and_back(name: str, tmp_path: Path) -> None:
    state = STATES[name]()
    checkpoint.save(state, tmp_path / "a.safetensors")
    there = checkpoint.convert(tmp_path / "a.safetensors", tmp_path / "b.pt")
    assert there.format == "torch"
    assert same(torch.load(tmp_path / "b.pt", weights_only=True), state)
    back = checkpoint.convert(tmp_path / "b.pt", tmp_path / "c.safetensors")
    assert back.format == "penstock" and back.checksummed
    assert same(checkpoint.load(tmp_path / "c.safetensors"), state)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.safetensors", "b.pt", "c.safetensors"]


def test_conversion_adds_checksums_and_keeps_metadata(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    safetensors.torch.save_file(FLAT, path, metadata={"run": "17"})
    info = checkpoint.convert(path, path, overwrite=True)
    assert info.checksummed and info.metadata == {"run": "17"}
    assert all(same(checkpoint.load(path)[name], tensor) for name, tensor in FLAT.items())


def test_a_file_that_is_there_is_replaced_only_where_that_is_wanted(tmp_path: Path) -> None:
    source, there = tmp_path / "a.safetensors", tmp_path / "b.pt"
    checkpoint.save(FLAT, source)
    there.write_text("old")
    for destination in (there, source):
        before = destination.read_bytes()
        with pytest.raises(penstock.InvalidArgument, match="exists"):
            checkpoint.convert(source, destination)
        assert destination.read_bytes() == before
        assert cli.main(["checkpoint", "convert", str(source), str(destination)]) == 1
        assert destination.read_bytes() == before
    assert cli.main(["checkpoint", "convert", str(source), str(there), "--overwrite"]) == 0
    assert same(torch.load(there, weights_only=True), FLAT)


def test_a_suffix_has_to_say_the_format(tmp_path: Path) -> None:
    checkpoint.save(FLAT, tmp_path / "state")
    with pytest.raises(penstock.InvalidArgument, match=r"\.safetensors.*\.pt"):
        checkpoint.convert(tmp_path / "state", tmp_path / "other.zip")


@pytest.mark.parametrize("name", ["a.pt", "a.pth", "model.bin", "last.CKPT", Path("run.1", "a.pt")])
@pytest.mark.parametrize("wait", [True, False])
def test_a_suffix_does_not_say_another_format(name: str | Path, wait: bool, tmp_path: Path) -> None:
    path = tmp_path / name
    with pytest.raises(penstock.InvalidArgument) as refused:
        checkpoint.save(FLAT, path, wait=wait)
    assert f"{path} would not be a file of torch.save" in str(refused.value)
    assert f"name it {path.stem}.safetensors" in str(refused.value)
    assert not list(tmp_path.iterdir())
    checkpoint.save(FLAT, tmp_path / "state")
    checkpoint.convert(tmp_path / "state", tmp_path / path.name)
    assert same(torch.load(tmp_path / path.name, weights_only=True), FLAT)


def test_nothing_is_left_of_a_conversion_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.save(FLAT, tmp_path / "state")
    (tmp_path / "b.pt").write_text("old")

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(penstock.PenstockError, match=r"b\.pt cannot be written: No space left"):
        checkpoint.convert(tmp_path / "state", tmp_path / "b.pt", overwrite=True)
    assert (tmp_path / "b.pt").read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 2


# -- the command line -------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    checkpoint.save(trained_gpt(torch.optim.AdamW), "state.safetensors", metadata={"run": "17"})
    return tmp_path


def test_info_shows_every_tensor(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["checkpoint", "info", "state.safetensors"]) == 0
    shown = capsys.readouterr().out
    assert "a checkpoint of penstock" in shown and "run: 17" in shown
    assert "model.head.weight" in shown and "64 x 32" in shown and "F32" in shown
    assert cli.main(["checkpoint", "info", "state.safetensors", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    info = checkpoint.info("state.safetensors")
    assert [tensor["name"] for tensor in answer["tensors"]] == [tensor.name for tensor in info.tensors]
    assert (answer["format"], answer["checksummed"], answer["metadata"]) == ("penstock", True, {"run": "17"})
    assert answer["tensor_bytes"] == info.tensor_bytes


def test_verify_says_whether_the_file_is_sound(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["checkpoint", "verify", "state.safetensors"]) == 0
    assert "every checksum is right" in capsys.readouterr().out
    data = bytearray(Path("state.safetensors").read_bytes())
    data[-1] ^= 1
    Path("state.safetensors").write_bytes(data)
    assert cli.main(["checkpoint", "verify", "state.safetensors", "--json"]) == 1
    shown = capsys.readouterr()
    assert "is damaged" in json.loads(shown.out)["error"]
    assert shown.err.startswith("penstock: error: state.safetensors is damaged")


def test_verify_says_where_there_are_no_checksums(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    safetensors.torch.save_file(FLAT, "other.safetensors")
    assert cli.main(["checkpoint", "verify", "other.safetensors"]) == 0
    assert "no checksums" in capsys.readouterr().out


def test_convert_names_what_it_wrote(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["checkpoint", "convert", "state.safetensors", "state.pt"]) == 0
    assert capsys.readouterr().out.endswith("wrote state.pt\n")
    assert same(torch.load("state.pt", weights_only=True), checkpoint.load("state.safetensors"))
    assert cli.main(["checkpoint", "convert", "state.pt", "again.safetensors", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["written"] == ["again.safetensors"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("info", "none"), "No such file"),
        (
            ("info", "ftp://a/b"),
            "ftp://a/b is of the kind ftp://, which cannot be used here: give a path, or s3://",
        ),
        (("ls", "ftp://a/b"), "ftp://a/b is of the kind ftp://, which cannot be used here"),
        (
            ("cp", "state.safetensors", "ftp://a/b"),
            "ftp://a/b is of the kind ftp://, which cannot be used here",
        ),
        (("verify", "notes.txt"), "notes.txt"),
        (("convert", "state.safetensors", "none/state.pt"), "Create the directory"),
        (("convert", "state.safetensors", "state.txt"), "does not say which format"),
    ],
)
def test_mistakes_are_one_line(
    arguments: tuple[str, ...], said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("notes.txt").write_text("not a checkpoint, but some text")
    assert cli.main(["checkpoint", *arguments]) == 1
    shown = capsys.readouterr()
    assert shown.out == "" and said in shown.err and shown.err.count("\n") == 1
