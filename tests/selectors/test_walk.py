"""Layer paths: what each variable of a model is called, and that it stays called so."""

from __future__ import annotations

import json

import keras
import path_cases
import pytest
from catalogs import chosen
from keras import layers

from keras_groupopt import selectors
from keras_groupopt.selectors.layer_paths import describe_model, describe_variables

# Keras reads weight files in a way that NumPy will no longer allow.
pytestmark = pytest.mark.filterwarnings(
    "ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning"
)
each_case = pytest.mark.parametrize("case", path_cases.CASES, ids=lambda case: case.name)

# Names each model after its case, describes it as made and as loaded from a file, and prints both.
IN_ANOTHER_PROCESS = """
import json, pathlib, sys
import keras, path_cases
from keras_groupopt.selectors.layer_paths import describe_model

path_cases.shift_automatic_names()
made, loaded = {}, {}
for case in path_cases.CASES:
    made[case.name] = describe_model(case.make()).paths
    file = pathlib.Path(f"{case.name}.keras")
    if file.exists():
        loaded[case.name] = describe_model(keras.models.load_model(file)).paths
print(json.dumps([made, loaded]))
"""


def built(layer: keras.Layer) -> keras.Layer:
    layer.build((None, 4))
    return layer


@each_case
def test_every_variable_has_its_layer_path_whatever_was_made_before(case):
    assert list(describe_model(case.make()).paths) == case.paths
    path_cases.shift_automatic_names()
    assert list(describe_model(case.make()).paths) == case.paths
    keras.utils.clear_session(free_memory=False)
    assert list(describe_model(case.make()).paths) == case.paths


@pytest.mark.parametrize(
    "case", [case for case in path_cases.CASES if case.can_be_saved], ids=lambda case: case.name
)
def test_a_loaded_model_is_described_like_the_one_saved(case, tmp_path):
    model = case.make()
    model.save(tmp_path / "model.keras")
    path_cases.shift_automatic_names()
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert describe_model(loaded).infos == describe_model(model).infos


def test_paths_are_the_same_in_another_process(tmp_path, new_process):
    here = {case.name: case.paths for case in path_cases.CASES}
    for case in path_cases.CASES:
        if case.can_be_saved:
            case.make().save(tmp_path / f"{case.name}.keras")
    made, loaded = json.loads(new_process(IN_ANOTHER_PROCESS).splitlines()[-1])
    assert made == here
    assert loaded == {case.name: case.paths for case in path_cases.CASES if case.can_be_saved}


@each_case
def test_the_catalog_is_in_the_order_of_the_model_and_says_what_each_variable_says(case):
    model = case.make()
    catalog = describe_model(model)
    assert [info.identity for info in catalog] == [id(weight) for weight in model.weights]
    trainable = [info.identity for info in catalog if info.trainable]
    assert trainable == [id(variable) for variable in model.trainable_variables]
    for info, weight in zip(catalog, model.weights, strict=True):
        assert (info.shape, info.rank) == (tuple(weight.shape), len(weight.shape))
        assert info.dtype == "float32"
        assert info.path == "/".join([*(layer.name for layer in info.layers), info.name])
        assert weight.path in (info.path, *info.aliases)
    assert {info.path: info.places[1:] for info in catalog if info.places[1:]} == case.shared
    # A layer and its path choose the same variables.
    for layer in model._flatten_layers(include_self=False):
        if layer.weights:
            config = selectors.layer(layer).get_config(catalog)
            again = selectors.Selector.from_config(config)
            assert again.resolve(catalog) == selectors.layer(layer).resolve(catalog)
            (layer_path,) = config["layers"]
            assert selectors.path(layer_path).resolve(catalog) == again.resolve(catalog)


def test_describing_changes_nothing_and_uses_up_no_name():
    model = path_cases.transformer()
    before = [(layer.name, layer.built, layer.trainable) for layer in model._flatten_layers()]
    first = layers.Dense(1).name
    describe_model(model)
    describe_variables(model.weights)
    assert layers.Dense(1).name == f"dense_{int(first.removeprefix('dense_')) + 1}"
    after = [(layer.name, layer.built, layer.trainable) for layer in model._flatten_layers()]
    assert after == before


def test_what_is_frozen_is_described_and_lora_adds_adapters_to_a_frozen_kernel():
    model = path_cases.functional_in_sequential()
    model.get_layer("backbone").trainable = False
    model.get_layer("head").enable_lora(2)
    trainable = [info.path for info in describe_model(model) if info.trainable]
    assert trainable == ["head/bias", "head/lora_kernel_a", "head/lora_kernel_b"]
    assert describe_model(model).paths[-4:-2] == ("head/kernel", "head/bias")


def test_the_classes_of_a_layer_are_named_up_to_keras_layer():
    catalog = describe_model(path_cases.wrappers())
    names = [layer.class_names for layer in catalog[0].layers]
    assert names == [("Bidirectional",), ("LSTM", "RNN"), ("LSTMCell",)]
    nested = describe_model(path_cases.functional_in_sequential())[0].layers[0]
    assert nested.class_names == ("Functional", "Model")


def test_only_a_model_or_layer_is_described_and_it_must_be_built():
    with pytest.raises(TypeError, match=r"`model` must be a Keras model.*type dict"):
        describe_model({"model": None})
    model = keras.Sequential([layers.Dense(2), layers.Dense(3, name="head")], name="net")
    with pytest.raises(ValueError, match=r"must .*'net'.*for 'dense', 'head'. Call `model\.build"):
        describe_model(model)
    assert describe_model(built(layers.Dense(2))).paths == ("kernel", "bias")


def test_a_model_of_built_layers_that_was_never_called_is_described():
    model = path_cases.FunctionalInSubclassedInTheOrderOfAssignment()
    with pytest.raises(ValueError, match="without variables for 'head'"):
        describe_model(model)
    model.head.build((None, 3))
    assert not model.built
    assert describe_model(model).paths[:3] == ("head/kernel", "head/bias", "backbone/stem/kernel")


def test_a_model_means_everything_in_it_and_a_list_of_layers_all_that_is_nested_in_them():
    parts = [path_cases.backbone("backbone"), layers.ReLU(), layers.Dense(2, name="head")]
    model = keras.Sequential([keras.Input((4,)), layers.Dense(4, name="first"), *parts])
    catalog = describe_model(model)
    whole, first, others = map(selectors.as_selector, (model, model.layers[0], model.layers[1:]))
    assert whole.resolve(catalog) == catalog.everything
    assert selectors.Selector.from_config(whole.get_config(catalog)) == selectors.everything()
    assert catalog.everything - others.resolve(catalog) == first.resolve(catalog)
    config = others.get_config(catalog)
    assert config == {"selector": "layer", "layers": ["backbone", "head"]}


@pytest.mark.backends("torch", reason="wraps torch modules")
def test_the_parameters_of_a_torch_module_are_numbered(backend):
    import torch

    keras.Variable(0.0)
    wrapped = layers.TorchModuleWrapper(torch.nn.Linear(4, 2))
    catalog = describe_model(keras.Sequential([keras.Input((4,)), wrapped]))
    assert catalog.paths == ("torch_module_wrapper/variable", "torch_module_wrapper/variable_1")
    with pytest.warns(UserWarning, match="'variable_2'.*'torch_module_wrapper/variable_1'"):
        selectors.path("variable_2").resolve(catalog)


@pytest.mark.needs_keras("3.15", reason="functional models do not track layers set on them")
def test_a_layer_that_is_not_built_is_named_when_it_is_asked_for():
    model = path_cases.backbone()
    model.spare = layers.Dense(2, name="spare")
    catalog = describe_model(model)
    assert catalog.unbuilt_layers == ("spare",)
    by_name = (selectors.path("spare"), selectors.layer("spare"))
    for selector in (*by_name, selectors.layer(model.spare)):
        with pytest.raises(ValueError, match="build it first"):
            selector.resolve(catalog)


def test_quantised_layers_keep_their_paths(tmp_path):
    model = path_cases.functional_in_sequential()
    model.get_layer("head").quantize("int8")
    catalog = describe_model(model)
    head = {info.path: info.dtype for info in catalog if info.path.startswith("head/")}
    assert head == {"head/kernel": "int8", "head/bias": "float32", "head/kernel_scale": "float32"}
    model.save(tmp_path / "model.keras")
    assert describe_model(keras.models.load_model(tmp_path / "model.keras")).infos == catalog.infos


class Holder(layers.Layer):
    def __init__(self, *below, **kwargs):
        super().__init__(**kwargs)
        self.below = below
        self.built = True


def test_the_places_of_a_variable_do_not_multiply_without_end():
    layer = built(layers.Dense(1, name="dense"))
    for level in range(10):
        sides = [Holder(layer, name=side) for side in ("left", "right")]
        layer = Holder(*sides, name=f"level_{level}")
    info = describe_model(layer)[0]
    above = [f"left/level_{level}" for level in range(8, -1, -1)]
    assert info.path == "/".join([*above, "left/dense/kernel"])
    assert len(info.places) == 256  # of 1024


def test_a_subclass_may_list_weights_that_it_does_not_hold():
    foreign = built(layers.Dense(2, name="foreign"))

    class Borrowing(keras.Sequential):
        @property
        def weights(self):
            return [*super().weights, *foreign.weights]

    model = Borrowing([keras.Input((4,)), layers.Dense(2, name="own")])
    paths = ("own/kernel", "own/bias", "foreign/kernel", "foreign/bias")
    assert describe_model(model).paths == paths


@pytest.mark.backends("tensorflow", "torch", reason="JAX compiles an initializer for every shape")
def test_mobilenet_has_its_layers_names():
    model = keras.applications.MobileNetV2((32, 32, 3), weights=None, include_top=False, alpha=0.35)
    expected = [f"{layer.name}/{v.name}" for layer in model.layers for v in layer.weights]
    assert list(describe_model(model).paths) == expected
    outer = keras.Sequential([keras.Input((32, 32, 3)), model, layers.Dense(2, name="head")])
    nested = [f"{model.name}/{path}" for path in expected]
    assert list(describe_model(outer).paths) == [*nested, "head/kernel", "head/bias"]


# Without a model: what variables are called by Keras' own path ---------------------------------


@each_case
def test_the_catalog_is_in_the_order_of_the_variables_whatever_was_made_before(case):
    model = case.make()
    catalog = describe_variables(model.trainable_variables)
    assert catalog.provisional
    assert len(describe_variables([])) == 0
    assert len(set(catalog.paths)) == len(catalog)
    assert [info.identity for info in catalog] == [id(v) for v in model.trainable_variables]
    assert [info.shape for info in catalog] == [tuple(v.shape) for v in model.trainable_variables]
    # There a name by hand equals an automatic one in this process only, and so do Keras' paths.
    if case.name != "ANameByHandThatIsAlsoANumberGiven":
        first = describe_variables(case.make().weights)
        path_cases.shift_automatic_names()
        assert describe_variables(case.make().weights).infos == first.infos


class Whirl(layers.Dense):
    pass


def test_automatic_names_are_counted_below_each_parent_and_names_by_hand_stay():
    path_cases.shift_automatic_names()
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3), layers.Dense(2)])
    by_hand = [layers.Dense(3, name="stage_2"), layers.Dense(2, name="dense_0")]
    named = keras.Sequential([keras.Input((4,)), *by_hand], name="net")
    kernels = [v for v in [*model.weights, *named.weights] if v.name == "kernel"]
    kernels += [built(Whirl(2)).kernel for _ in range(3)][1:]
    loose = [keras.Variable(0.0), keras.Variable(0.0)]
    assert describe_variables([*kernels, *loose]).paths == (
        *("sequential/dense/kernel", "sequential/dense_1/kernel"),
        *("net/stage_2/kernel", "net/dense_0/kernel"),
        *("whirl/kernel", "whirl_1/kernel", "variable", "variable_1"),
    )


def test_what_keras_gives_one_path_is_told_apart():
    towers = [built(layers.Dense(2, name="stem")) for _ in range(2)]
    loose = [keras.Variable(0.0, name="scale") for _ in range(2)]
    catalog = describe_variables([*towers[0].weights, *towers[1].weights, *loose])
    stems = ("stem@1/kernel", "stem@1/bias", "stem@2/kernel", "stem@2/bias")
    assert catalog.paths == (*stems, "scale@1", "scale@2")
    with pytest.raises(ValueError, match="'stem@1/kernel', 'stem@1/bias', 'stem@2/kernel'"):
        selectors.path("stem").resolve(catalog)


def test_a_layer_is_found_by_its_weights_without_a_model():
    model = path_cases.functional_in_sequential()
    catalog = describe_variables(model.trainable_variables)
    assert chosen(selectors.layer(model.layers[0]), catalog) == [
        *("stem/kernel", "stem/bias", "dense/kernel", "dense/bias"),
        *("dense_1/kernel", "dense_1/bias"),
    ]
    with pytest.raises(ValueError, match="pass `model=`"):
        selectors.path("backbone").resolve(catalog)
