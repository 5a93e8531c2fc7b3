"""Token sequences packed into blocks: every token once, documents kept apart, and hardly any padding."""

from __future__ import annotations

import itertools
import os
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from penstock.errors import InvalidArgument, SampleError
from penstock.samples import (
    Loader,
    Mixture,
    Packed,
    document_mask,
    filtered,
    merge_states,
    mount,
    pack,
    packed,
)
from penstock.samples.epochs import from_state
from tests.support.stores import write_store

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


def token_store(folder: Path, lengths: list[int]) -> list[list[int]]:
    """Sequence i is i + 1 in all of its tokens, so that it can be told from its neighbours."""
    documents = [[index + 1] * length for index, length in enumerate(lengths)]
    named = [(str(i), np.array(each, "<u2").tobytes()) for i, each in enumerate(documents)]
    write_store(folder, named)
    return documents


def documents_of(batches: list[dict[str, torch.Tensor]], pad: int) -> list[list[int]]:
    """The runs of the blocks, as position_ids divide them, without padding."""
    found = []
    for batch in batches:
        for tokens, positions in zip(
            batch["input_ids"].tolist(), batch["position_ids"].tolist(), strict=True
        ):
            begins = [at for at, position in enumerate(positions) if position == 0] + [len(tokens)]
            runs = [tokens[begin:end] for begin, end in itertools.pairwise(begins)]
            found += [run for run in runs if run != [pad]]
    return found


@settings(max_examples=50)
@given(
    lengths=st.lists(st.integers(0, 70), min_size=1, max_size=60).filter(any),
    block=st.integers(1, 40),
    window=st.sampled_from([1, 7, 8192]),
    batch_size=st.integers(1, 5),
)
def test_every_token_comes_once_and_no_run_is_longer_than_a_block(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], block: int, window: int, batch_size: int
) -> None:
    folder = tmp_path_factory.mktemp("tokens")
    documents = token_store(folder, lengths)
    with mount(folder) as store:
        source = packed(store, block, tokens="uint16", window=window, pad=0)
        batches = list(Loader(source, batch_size))
        runs = documents_of(batches, 0)
    wanted = [each[begin : begin + block] for each in documents for begin in range(0, len(each), block)]
    assert sorted(runs) == sorted(wanted)
    for batch in batches:
        tokens, labels, positions = batch["input_ids"], batch["labels"], batch["position_ids"]
        assert tokens.shape == labels.shape == positions.shape and tokens.shape[1] == block
        first_or_padding = positions == 0
        assert torch.equal(labels, torch.where(first_or_padding, -100, tokens))
    padding = sum(int((batch["input_ids"] == 0).sum()) for batch in batches)
    assert source.waste == pytest.approx(padding / (len(source) * block))
    # Best fit never leaves two blocks of a window that would fit into one.
    if window == 8192:
        filled = sorted(int((row != 0).sum()) for batch in batches for row in batch["input_ids"])
        assert len(filled) < 2 or filled[0] + filled[1] > block


def test_less_than_a_percent_is_padding_for_the_lengths_of_real_text(tmp_path: Path) -> None:
    """The lengths of this repository's own paragraphs, in bytes, and log-normal ones, as web pages have."""
    root = Path(__file__).parents[2]
    text = "\n\n".join(path.read_text() for path in sorted((root / "docs").rglob("*.md")))
    paragraphs = [paragraph.encode() for paragraph in text.split("\n\n") if paragraph]
    pack(((str(i), each) for i, each in enumerate(paragraphs)), tmp_path / "paragraphs")
    drawn = np.random.default_rng(0).lognormal(6.2, 1.1, 20_000).astype(int) + 1
    pack(((str(i), bytes(2 * int(length))) for i, length in enumerate(drawn)), tmp_path / "pages")
    for name, dtype, block in (
        ("paragraphs", "uint8", 2048),
        ("pages", "uint16", 2048),
        ("pages", "uint16", 8192),
    ):
        with mount(tmp_path / name) as store:
            assert packed(store, block, tokens=dtype).waste < 0.01


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("blocks") / "store"
    lengths = random.Random(1)
    token_store(folder, [lengths.randrange(1, 90) for _ in range(120)])
    return folder


def loader_of(folder: Path, batch_size: int, rank: int = 0, world_size: int = 1, **options: Any) -> Loader:
    source = packed(
        mount(folder, rank=rank, world_size=world_size, timeout_s=10), 64, tokens="uint16", window=40
    )
    return Loader(source, batch_size, decode_batch=lambda batch: batch.indices.tolist(), seed=4, **options)


@settings(max_examples=30)
@given(
    batch_size=st.integers(1, 7),
    stops=st.lists(st.tuples(st.integers(1, 4), st.integers(0, 5)), max_size=3),
    last=st.integers(1, 4),
)
def test_every_block_comes_once_to_any_number_of_processes(
    folder: Path, batch_size: int, stops: list[tuple[int, int]], last: int
) -> None:
    state: dict[str, Any] | None = None
    seen: list[int] = []
    blocks = 0
    for world_size, batches in [*stops, (last, None)]:
        states = []
        for rank in range(world_size):
            loader = loader_of(folder, batch_size, rank, world_size)
            blocks = len(loader.store)
            if state is not None:
                loader.load_state_dict(state)
            seen += itertools.chain(*itertools.islice(loader, batches))
            states.append(loader.state_dict())
        state = merge_states(states)
        if from_state(state).over:
            break
    assert sorted(seen) == list(range(blocks))


def test_a_position_goes_on_in_the_middle(folder: Path) -> None:
    whole = list(loader_of(folder, 3))
    first, second = loader_of(folder, 3), loader_of(folder, 3)
    begun = list(itertools.islice(first, 4))
    second.load_state_dict(first.state_dict())
    assert begun + list(second) == whole
    # Sizes may change in the middle of an epoch, too.
    source = loader_of(folder, 3).store
    source.sequence(seed=4)
    sizes = [3, 1, 5, 2, 1000]
    found = [source.bread(size).indices.tolist() for size in sizes]  # type: ignore[union-attr]
    assert list(itertools.chain(*found)) == list(itertools.chain(*whole))
    assert source.bread(1) is None and source.taken == len(source)


def test_workers_share_the_blocks(folder: Path) -> None:
    loader = loader_of(folder, 3)
    again = pickle.loads(pickle.dumps(packed(mount(folder), 64, tokens="uint16", window=40)))
    assert again.identity == loader.store.identity and len(again) == len(loader.store)
    for _ in range(2):
        batches = DataLoader(loader, batch_size=None, num_workers=2)
        assert sorted(itertools.chain(*batches)) == list(range(len(again)))
    blocks = DataLoader(Loader(again, 3), batch_size=None, num_workers=1)
    assert sum(len(batch["labels"]) for batch in blocks) == len(again)


def test_fields_functions_filters_and_mixtures(tmp_path: Path) -> None:
    rows = np.arange(1, 41, dtype=np.int32).reshape(10, 4)
    pack({"tokens": rows}, tmp_path / "records")
    lists = [list(range(100, 100 + length)) for length in (3, 9, 2, 5)]
    pack(((str(i), {"ids": each}) for i, each in enumerate(lists)), tmp_path / "maps")
    records, maps = mount(tmp_path / "records"), mount(tmp_path / "maps")
    some = packed(filtered(records, range(0, 10, 2)), 8, tokens="tokens")
    assert sorted(documents_of(list(Loader(some, 2)), 0)) == rows[::2].tolist()
    found = packed(maps, 8, tokens="ids")
    by_function = packed(mount(tmp_path / "maps"), 8, tokens=lambda sample: sample.fields["ids"])
    wanted = [[100, 101, 102], list(range(100, 108)), [108], [100, 101], list(range(100, 105))]
    for source in (found, by_function):
        assert sorted(documents_of(list(Loader(source, 2)), 0)) == sorted(wanted)
    mixture = Mixture({some: 2, found: 1}, samples_per_epoch=30)
    assert mixture.draws() == (20, 10)
    (batch,) = list(Loader(mixture, 30))
    assert batch["input_ids"].shape == (30, 8)
    assert int((batch["input_ids"][:, 0] < 100).sum()) == 20
    mixture.sequence()
    part = mixture.bread(5)
    again = pickle.loads(pickle.dumps(part))
    assert np.array_equal(again.decoded()["labels"], part.decoded()["labels"])  # type: ignore[union-attr]
    assert again.names() == part.names()  # type: ignore[union-attr]
    for first, change in (20, -3), (2, 5):
        with pytest.raises(SampleError, match=r"(fewer|more) than when it was packed"):
            changing = packed(maps, 8, tokens=iter_lengths(first, change))
            list(Loader(changing, 2))


def iter_lengths(first: int, change: int) -> Any:
    """Another length at each call: no pure function."""
    lengths = itertools.count(first, change)
    return lambda sample: [1] * max(1, next(lengths))


def test_sequences_do_not_see_each_other(tmp_path: Path) -> None:
    """Attention under the mask, and a model of transformers with position_ids, give what each alone gives."""
    transformers = pytest.importorskip("transformers")
    token_store(tmp_path, [5, 9, 2, 12, 7])
    with mount(tmp_path) as store:
        (batch,) = list(Loader(packed(store, 20, tokens="uint16"), 10))
    mask = document_mask(batch["position_ids"])
    query, key, value = torch.randn(3, len(mask), 2, 20, 4, dtype=torch.float64)
    mixed = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=16, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(config).double().eval()
    together = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
    runs = 0
    for row, positions in enumerate(batch["position_ids"].tolist()):
        begins = [at for at, position in enumerate(positions) if position == 0] + [20]
        for begin, end in itertools.pairwise(begins):
            here = (row, slice(None), slice(begin, end))
            alone = torch.nn.functional.scaled_dot_product_attention(
                query[here], key[here], value[here], is_causal=True
            )
            torch.testing.assert_close(mixed[here], alone)
            if batch["input_ids"][row, begin]:
                logits = model(input_ids=batch["input_ids"][row : row + 1, begin:end]).logits
                torch.testing.assert_close(together[row : row + 1, begin:end], logits)
                runs += 1
    assert runs == 5


def test_what_cannot_be_packed_is_refused(folder: Path, tmp_path: Path) -> None:
    store = mount(folder)
    write_store(tmp_path / "odd", [("a", b"12"), ("b", b"123")])
    write_store(tmp_path / "empty", [("a", b"")])
    pack({"x": np.zeros((4, 2), np.float32)}, tmp_path / "floats")
    pack(((str(i), {"ids": [1, 2]} if i else {}) for i in range(3)), tmp_path / "lacking")
    for path, block, tokens, message in [
        (folder, 0, "uint16", "a block of 0 tokens holds none"),
        (folder, 8, "input_ids", "no integer dtype: the samples are bytes"),
        (folder, 8, "float16", "no integer dtype"),
        (folder, 8, ">u2", "have to be little-endian"),
        (folder, 8, "u2,,", "no integer dtype"),
        (folder, 8.5, "uint16", "block=8.5 is no whole number"),
        (folder, 8, lambda sample: [(1 << 64) - 1], "18446744073709551615 does not fit into int64"),
        (folder, 8, 3, "give a dtype, the name of a field, or a function"),
        (folder, 8, lambda sample: np.zeros((2, 2), int), r"shape \(2, 2\)"),
        (tmp_path / "odd", 8, "uint16", r"sample 1 \('b'\) has 3 bytes, which are not whole tokens"),
        (tmp_path / "empty", 8, "uint16", "no tokens to pack"),
        (tmp_path / "floats", 8, "y", r"no field of \[tokens\]: the fields are x"),
        (tmp_path / "lacking", 8, "ids", "not every sample has a field 'ids'"),
    ]:
        with pytest.raises(InvalidArgument, match=message):
            next(iter(Loader(packed(mount(path), block, tokens=tokens), 1)))  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="pad=None is no whole number"):
        packed(store, 8, tokens="uint16", pad=None)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="a window of 0 samples"):
        packed(store, 8, tokens="uint16", window=0)
    with pytest.raises(InvalidArgument, match="a Mixture cannot be packed: pack its stores"):
        packed(Mixture({store: 1}), 8, tokens="uint16")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="is a path"):
        packed(str(folder), 8, tokens="uint16")  # type: ignore[arg-type]
    source: Packed = packed(store, 8, tokens="uint16")
    with pytest.raises(InvalidArgument, match="no such sequence"):
        source.sequence(replica=3, replicas=2)
    with pytest.raises(InvalidArgument, match="a batch of 0"):
        source.bread(0)


def test_a_position_of_another_tokenizer_is_refused(folder: Path) -> None:
    """Also one that makes as many blocks."""
    one, other = (
        packed(mount(folder), 8, lambda sample, odd=odd: [1] * (2 + (sample.index + odd) % 2))
        for odd in (0, 1)
    )
    assert len(one) == len(other)
    with pytest.raises(InvalidArgument, match="of another store"):
        Loader(other, 1).load_state_dict(Loader(one, 1).state_dict())


def test_a_forked_child_does_not_begin_another_epoch_unasked(folder: Path) -> None:
    source = packed(mount(folder), 8, tokens="uint16")
    source.sequence(seed=9)
    source.bread(1)
    child = os.fork()
    if not child:
        try:
            source.bread(1)
        except InvalidArgument as error:
            os._exit(0 if "forked during an epoch" in str(error) else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
