"""A tree that was not written by penstock is refused, or gives a state that stays inside its entries."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.checkpoint.tree import unflatten
from penstock.errors import InvalidFile
from tests.support.drawn_states import FILE, reach_of, tensors_of

ENTRIES: dict[str, Callable[[], torch.Tensor]] = {
    "f": lambda: torch.arange(6.0).view(2, 3),
    "b": lambda: torch.arange(32, dtype=torch.uint8).view(2, 16),
    "i": lambda: torch.arange(3),
    "s": lambda: torch.tensor(1.0),
    "n": lambda: torch.empty(0, 4),
}


def entries() -> dict[str, torch.Tensor]:
    return {name: make() for name, make in ENTRIES.items()}


HOSTILE = [
    *(
        "",
        "{",
        "nul",
        "[1,]",
        "NaN",
        "Infinity",
        '{"a":1,"a":1}',
        '{"x":{"$tensor":"f","$tensor":"f"}}',
        "\ufeff1",
        "1 2",
    ),
    *("9" * 5000, "[" * 100_000, '{"a":' * 100_000, "[" * 900 + "]" * 900, '{"$tuple":[' * 300 + "]}" * 300),
    *(
        '{"$dict":[[' + '{"$tuple":[' * 300 + "]}" * 300 + ",1]]}",
        '{"$OrderedDict":' * 300 + "{}" + "}" * 300,
    ),
    *(
        '{"$unknown":1}',
        '{"$":1}',
        '{"$tensor":"absent"}',
        '{"$tensor":null}',
        '{"$tensor":["f"]}',
        '{"$tensor":{}}',
    ),
    *('{"$tensor":"f","x":1}', '{"$tensor":"f","$parameter":"f"}', '{"$tensor":"f","requires_grad":1}'),
    *('{"$tensor":"i","requires_grad":true}', '{"$parameter":"i"}', '{"$tensor":"f","dtype":1}'),
    *(
        '{"$tensor":"f","dtype":"float64"}',
        '{"$tensor":"b","dtype":"quint8"}',
        '{"$tensor":"f","dtype":"Tensor"}',
    ),
    *(
        '{"$tensor":"b","dtype":"float32"}',
        '{"$tensor":"s","dtype":"complex128"}',
        '{"$tensor":"f","dtype":"int32"}',
    ),
    *('{"$tensor":"f","stride":[1,2,3]}', '{"$tensor":"f","stride":[1,1]}', '{"$tensor":"f","stride":[1,4]}'),
    *(
        '{"$tensor":"f","stride":[0,0]}',
        '{"$tensor":"f","stride":[1,-2]}',
        '{"$tensor":"f","stride":null,"x":1}',
    ),
    *(
        '{"$tensor":"f","shape":[6]}',
        '{"$tensor":"f","offset":0}',
        '{"$tensor":"f","shape":[6],"stride":[1]}',
    ),
    '{"$tensor":"f","shape":[7],"stride":[1],"offset":0}',
    '{"$tensor":"f","shape":[6],"stride":[1],"offset":1}',
    '{"$tensor":"f","shape":[6],"stride":[1],"offset":-1}',
    '{"$tensor":"f","shape":[2],"stride":[-1],"offset":1}',
    '{"$tensor":"f","shape":[-1],"stride":[1],"offset":0}',
    '{"$tensor":"f","shape":[2],"stride":[6],"offset":0}',
    '{"$tensor":"f","shape":[2,2],"stride":[5,1],"offset":0}',
    '{"$tensor":"f","shape":[1],"stride":[1],"offset":6}',
    '{"$tensor":"f","shape":[0],"stride":[1],"offset":7}',
    '{"$tensor":"f","shape":[true],"stride":[1],"offset":0}',
    '{"$tensor":"f","shape":[1.0],"stride":[1],"offset":0}',
    '{"$tensor":"f","shape":[2],"stride":[1,1],"offset":0}',
    '{"$tensor":"f","shape":"6","stride":"1","offset":0}',
    '{"$tensor":"f","shape":[2],"stride":[4611686018427387904],"offset":0}',
    '{"$tensor":"f","shape":[2,2],"stride":[9223372036854775807,9223372036854775807],"offset":0}',
    '{"$tensor":"f","shape":[4294967296,4294967296],"stride":[0,0],"offset":0}',
    '{"$tensor":"f","shape":[1],"stride":[1],"offset":18446744073709551616}',
    '{"$tensor":"f","shape":[4],"stride":[1],"offset":0,"dtype":"float64"}',
    '{"$tensor":"i","shape":[2],"stride":[1],"offset":0,"dtype":"complex128"}',
    f'{{"$tensor":"f","shape":{[1] * 65},"stride":{[1] * 65},"offset":0}}',
    *('{"$tensors":"f"}', '{"$tensors":["absent"]}', '{"$tensors":[1]}', '{"$tensors":["f"],"prefix":1}'),
    *('{"$tensors":["f","f"]}', '{"$tensors":["f"],"x":1}', '{"$array":"f"}', '{"$array":"f","dtype":"O"}'),
    *('{"$array":"f","dtype":"<f8"}', '{"$array":"absent","dtype":"<f4"}', '{"$array":"f","dtype":"<f16"}'),
    *(
        '{"$array":"f","dtype":1}',
        '{"$array":"b","dtype":"V16"}',
        '{"$dict":1}',
        '{"$dict":[1]}',
        '{"$dict":[[1]]}',
    ),
    *('{"$dict":[[[],1]]}', '{"$dict":[[{},1]]}', '{"$dict":[[1,1],[1,2]]}', '{"$dict":[[1,1],[true,2]]}'),
    *('{"$dict":[[{"$tensor":"f"},1]]}', '{"$dict":[[{"$bytes":""},1]]}', '{"$dict":[[{"$tuple":[[]]},1]]}'),
    *(
        '{"$OrderedDict":1}',
        '{"$OrderedDict":[]}',
        '{"$OrderedDict":{"$OrderedDict":{}}}',
        '{"$OrderedDict":{},"x":1}',
    ),
    *(
        '{"$tuple":1}',
        '{"$tuple":{}}',
        '{"$tuple":[],"x":1}',
        '{"$size":[1.0]}',
        '{"$size":["a"]}',
        '{"$size":[true]}',
    ),
    *('{"$size":[9223372036854775808]}', '{"$float":1}', '{"$float":"nan"}', '{"$float":"7FF8000000000000"}'),
    *(
        '{"$int":1}',
        '{"$int":""}',
        '{"$int":"0x1"}',
        '{"$int":"1_0"}',
        '{"$int":" 1"}',
        '{"$complex":1}',
        '{"$complex":[1]}',
    ),
    *(
        '{"$complex":[1,2]}',
        '{"$complex":[1.0,"a"]}',
        '{"$complex":[1.0,2.0,3.0]}',
        '{"$bytes":1}',
        '{"$bytes":"a"}',
    ),
    *(
        '{"$bytes":"é"}',
        '{"$bytes":"YQ==!"}',
        '{"$numpy":"<f4","bits":"00"}',
        '{"$numpy":"O","bits":"0000000000000000"}',
    ),
    *(
        '{"$numpy":"<f4","bits":"zzzzzzzz"}',
        '{"$numpy":"<f4"}',
        '{"$dtype":1}',
        '{"$dtype":"Tensor"}',
        '{"$dtype":"nn"}',
    ),
    *(
        '{"$device":1}',
        '{"$device":""}',
        '{"$device":"no"}',
        '{"$device":"cpu:x"}',
        '{"$device":"cuda:99999999999999999999"}',
    ),
]


@pytest.mark.parametrize("number", range(len(HOSTILE)))
def test_a_tree_that_describes_no_state_is_refused(number: int) -> None:
    with pytest.raises(InvalidFile, match=f"^{FILE} is damaged: ") as caught:
        unflatten(HOSTILE[number], entries(), FILE)
    assert len(str(caught.value)) < 700


TREES = [
    '{"a":{"$tensor":"f","shape":[2,2],"stride":[1,2],"offset":1},"b":{"$tensor":"b","dtype":"complex128"}}',
    '{"$dict":[[1,{"$parameter":"s","requires_grad":false}],[{"$tuple":[1,2]},{"$tensor":"f","stride":[1,2]}]]}',
    '{"$OrderedDict":{"$tensors":["f","n"]},"_metadata":{"x":{"$float":"7ff0000000000000"},"y":[1,2.5,null]}}',
    '[{"$array":"i","dtype":"<i8"},{"$numpy":"<f4","bits":"00000000"},{"$complex":[1.0,2.0]},{"$bytes":"YQ=="}]',
    '{"$tuple":[{"$size":[1,2]},{"$int":"-ff"},{"$dtype":"int8"},{"$device":"cpu"},{"$tensor":"f","alias":2}]}',
]
PIECES = [
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    '"',
    "0",
    "1",
    "7",
    "-1",
    "1e9",
    "null",
    "true",
    '"f"',
    '"$tensor"',
    "[]",
    "{}",
]
PIECES += [
    '"stride":',
    '"shape":[9]',
    '"offset":',
    '"dtype":"int64"',
    "9223372036854775807",
    '"$dict"',
    '{"$tensor":"b"}',
]


@st.composite
def mutations(draw: st.DrawFn) -> str:
    text = draw(st.sampled_from(TREES))
    for _ in range(draw(st.integers(1, 3))):
        begin = draw(st.integers(0, len(text)))
        end = draw(st.integers(begin, min(len(text), begin + 8)))
        text = text[:begin] + draw(st.sampled_from([*PIECES, ""])) + text[end:]
    return text


@settings(max_examples=1000)
@given(mutations())
def test_a_changed_tree_is_refused_or_stays_inside_its_entries(text: str) -> None:
    tensors = entries()
    try:
        state = unflatten(text, tensors, FILE)
    except InvalidFile:
        return
    for tensor in tensors_of(state):
        storage = tensor.untyped_storage()
        assert storage.nbytes() <= 64
        if tensor.numel():
            begin, end = reach_of(tensor)
            assert storage.data_ptr() <= begin and end <= storage.data_ptr() + storage.nbytes()


@pytest.mark.parametrize("tree", TREES)
def test_the_trees_that_are_changed_are_good(tree: str) -> None:
    unflatten(tree, entries(), FILE)
