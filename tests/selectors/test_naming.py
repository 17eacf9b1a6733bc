"""Which names are automatic, and that no two children of a parent share one."""

from __future__ import annotations

import keras
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keras_groupopt.selectors.layer_names import automatic_bases, number_siblings, snake_case


@settings(max_examples=50)
@given(st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,15}", fullmatch=True))
def test_the_first_automatic_name_of_a_class_is_what_keras_gives(class_name):
    keras.utils.clear_session(free_memory=False)
    cls = type(class_name, (keras.layers.Layer,), {})
    names = [cls().name for _ in range(3)]
    assert snake_case(class_name) == names[0]
    assert automatic_bases(names, [{snake_case(class_name)}] * 3) == [names[0]] * 3


@pytest.mark.parametrize(
    ("name", "class_name", "base"),
    [
        ("dense", "Dense", "dense"),
        ("dense_12", "Dense", "dense"),
        ("conv2d_transpose_3", "Conv2DTranspose", "conv2d_transpose"),
        ("forward_lstm_2", "LSTM", "forward_lstm"),
        ("backward_gru", "GRU", "backward_gru"),
        ("block_2", "Block_2", "block_2"),
        ("block_2_1", "Block_2", "block_2"),
        ("dense_", "Dense", None),
        ("dense_a", "Dense", None),
        ("dense_1_2", "Dense", None),
        ("Dense", "Dense", None),
        ("my_dense_1", "Dense", None),
        ("dense_1", "EinsumDense", None),
        ("dense_0", "Dense", None),
        ("dense_01", "Dense", None),
        ("", "Dense", None),
    ],
)
def test_a_name_is_automatic_if_it_is_the_class_name_with_or_without_a_number(
    name, class_name, base
):
    assert automatic_bases([name], [{snake_case(class_name)}]) == [base]


def test_names_counted_from_0_are_by_hand_for_the_whole_class():
    names = ["block_0", "dense", "block_1", "block"]
    bases = [{"block"}, {"dense"}, {"block"}, {"block"}]
    assert automatic_bases(names, bases) == [None, "dense", None, None]


NAMES = st.lists(st.sampled_from(["a", "a@1", "a@2", "a_1", "a_7", "a_0", "b", "b_1"]), max_size=8)


@given(NAMES)
def test_no_two_siblings_share_a_name(names):
    bases = automatic_bases(names, [{"a"}] * len(names))
    result = number_siblings(names, bases)
    assert len(set(result)) == len(names)


@given(NAMES, st.integers(1, 50))
def test_the_counter_of_the_process_changes_no_name(names, shift):
    automatic = [name for name in names if name.startswith(("a_", "b")) and name != "a_0"]
    shifted = [
        f"a_{int(name.removeprefix('a_')) + shift}" if name.startswith("a_") else name
        for name in automatic
    ]
    possible = [{"a"}] * len(automatic)
    assert number_siblings(shifted, automatic_bases(shifted, possible)) == number_siblings(
        automatic, automatic_bases(automatic, possible)
    )
