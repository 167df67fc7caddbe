"""Every printed form of replica groups, against numpy."""

from __future__ import annotations

import itertools
import math

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from zeroj.aot.groups import group_text, nodes_spanned, parse_groups
from zeroj.aot.shapes import HloError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{}", [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ("{{0,1},{2,3},{4,5},{6,7}}", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("[2,4]<=[8]", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("[4,2]<=[2,4]T(1,0)", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("mesh['node'=2,'local'=4] {'local'}", [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ("mesh['node'=2,'local'=4] {'node'}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("mesh[node=2,local=4] {local,node}", [[0, 4, 1, 5, 2, 6, 3, 7]]),
        ("mesh['a'=8] {'a':(1)2}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("mesh['a'=8] {'a':(4)2}", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("mesh['a'=8] {'a':(1)2,'a':(4)2}", [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ("mesh['a'=2,'b'=4], device_ids=(0,2,4,6,1,3,5,7) {'b'}", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("mesh['a'=2,'b'=4], device_ids=([2,4]<=[4,2]T(1,0)) {'b'}", [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("mesh['a'=1,'b'=8], device_ids=([4,2]T(1,0)) {'b'}", [[0, 2, 4, 6, 1, 3, 5, 7]]),
        ("mesh['a'=1,'b'=8] {'a'}", [[i] for i in range(8)]),
    ],
)
def test_forms(text: str, expected: list[list[int]]) -> None:
    np.testing.assert_array_equal(parse_groups(text, 8), expected)


@pytest.mark.parametrize(
    "text", ["[2,4]=>[8]", "{0,1}", "mesh['a'=8] {'b'}", "{{0,1},{2}}", "maximal_mesh[device_id=0] {}"]
)
def test_what_is_not_understood_is_an_error_that_shows_it(text: str) -> None:
    with pytest.raises(HloError) as error:
        parse_groups(text, 8)
    assert text in str(error.value)


@hypothesis.given(st.data())
def test_mesh_iota_and_list_forms_agree(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=4))
    grouped = data.draw(st.permutations(range(len(sizes))))[: data.draw(st.integers(1, len(sizes)))]
    outer = [i for i in range(len(sizes)) if i not in grouped]
    group = math.prod(sizes[i] for i in grouped)
    ids = np.arange(math.prod(sizes)).reshape(sizes).transpose(outer + list(grouped)).reshape(-1, group)

    names = [f"x{i}" for i in range(len(sizes))]
    axes = ",".join(f"'{n}'={s}" for n, s in zip(names, sizes))
    mesh_form = f"mesh[{axes}] {{{','.join(repr(names[i]) for i in grouped)}}}"
    order = ",".join(map(str, outer + list(grouped)))
    iota_form = f"[{ids.shape[0]},{ids.shape[1]}]<=[{','.join(map(str, sizes))}]T({order})"
    list_form = "{" + ",".join("{" + ",".join(map(str, row)) + "}" for row in ids) + "}"
    for form in (mesh_form, iota_form, list_form):
        np.testing.assert_array_equal(parse_groups(form, ids.size), ids, err_msg=form)


@pytest.mark.parametrize(
    "form", ["{{0,1},{2,3}}", "[2,4]<=[8]", "[4,2]<=[2,4]T(1,0)", "mesh['a'=2] {'a'}", "{}"]
)
@pytest.mark.parametrize("rest", ["", ", dimensions={0}", ", use_global_device_ids=true, metadata={a={b}}"])
def test_the_groups_are_cut_out_of_the_attributes(form: str, rest: str) -> None:
    assert group_text(f", channel_id=1, replica_groups={form}{rest}") == form


def test_no_groups() -> None:
    assert group_text(", channel_id=1") is None


def test_nodes_spanned_counts_the_nodes_of_the_widest_group() -> None:
    assert nodes_spanned(np.array([[0, 1], [2, 3]]), 4) == 1
    assert nodes_spanned(np.array([[0, 4]]), 4) == 2
    assert nodes_spanned(np.arange(32).reshape(1, -1), 4) == 8
    for size, per_node in itertools.product([8, 16], [2, 8]):
        assert nodes_spanned(np.arange(size).reshape(1, -1), per_node) == size // per_node
