"""What each selector chooses, how it is written, and what it says when it can't be meant."""

from __future__ import annotations

import json
import re

import pytest
from catalogs import catalog, chosen, variable

from keras_groupopt import selectors
from keras_groupopt.selectors import (
    Selector,
    as_selector,
    by_object,
    default_exclude_from_decay,
    everything,
    layer,
    layer_type,
    path,
    rank,
    regex,
    set_function_serializer,
    variable_name,
    variables,
    where,
    xpath,
)
from keras_groupopt.selectors.variable_info import VariableCatalog, VariableInfo

CLASSES = {
    "net": ("Functional", "Model"),
    "net/conv_1": ("Conv2D", "BaseConv"),
    "net/conv_2": ("Conv2D", "BaseConv"),
    "net/norm": ("BatchNormalization",),
    "head": ("Dense",),
}
MODEL = catalog(
    "token",
    variable("net/conv_1/kernel", shape=(3, 3, 1, 4), classes=CLASSES),
    variable("net/conv_1/bias", classes=CLASSES),
    variable("net/conv_2/kernel", shape=(3, 3, 4, 4), classes=CLASSES),
    variable("net/norm/gamma", classes=CLASSES),
    variable("net/norm/moving_mean", trainable=False, classes=CLASSES),
    variable("head/kernel", classes=CLASSES),
    variable("head/bias", classes=CLASSES),
)
ALL = list(MODEL.paths)


class FakeLayer:
    """What a selector reads of a layer: a name and weights."""

    def __init__(self, name: str, *weights: object) -> None:
        self.name = name
        self.weights = list(weights)


class FakeVariable:
    def __init__(self, path: str) -> None:
        self.path = path
        self.shape = (2,)
        self.trainable = True

    def __eq__(self, other: object) -> bool:
        raise AssertionError("variables compare element by element; identity is meant")

    __hash__ = object.__hash__


def holding(*values: FakeVariable) -> VariableCatalog:
    return VariableCatalog(
        tuple(VariableInfo(v.path, v.path.split("/")[-1], v.shape, identity=id(v)) for v in values)
    )


GLOBS = {
    "token": ["token"],
    "head": ["head/kernel", "head/bias"],
    "head/kernel": ["head/kernel"],
    "net/conv_1": ["net/conv_1/kernel", "net/conv_1/bias"],
    "net/conv_?": ["net/conv_1/kernel", "net/conv_1/bias", "net/conv_2/kernel"],
    "net/conv_?/kernel": ["net/conv_1/kernel", "net/conv_2/kernel"],
    "net/conv_[2-9]": ["net/conv_2/kernel"],
    "net/conv_[!2]": ["net/conv_1/kernel", "net/conv_1/bias"],
    "net/[cn]o*": ALL[1:6],
    "net/**/kernel": ["net/conv_1/kernel", "net/conv_2/kernel"],
    "**/kernel": ["net/conv_1/kernel", "net/conv_2/kernel", "head/kernel"],
    "**/bias/**": ["net/conv_1/bias", "head/bias"],
    "**/conv_1": ["net/conv_1/kernel", "net/conv_1/bias"],
    "**/token": ["token"],
    "**/net/**/**/norm": ["net/norm/gamma", "net/norm/moving_mean"],
    "*/kernel": ["head/kernel"],
    "*/*/kernel": ["net/conv_1/kernel", "net/conv_2/kernel"],
    "*": ALL,
    "**": ALL,
    "t*n": ["token"],
}
REGEXES = {
    "head": ["head/kernel", "head/bias"],
    r"net/conv_\d": ["net/conv_1/kernel", "net/conv_1/bias", "net/conv_2/kernel"],
    r".*/kernel": ["net/conv_1/kernel", "net/conv_2/kernel", "head/kernel"],
    r"(?i)HEAD/.*": ["head/kernel", "head/bias"],
    r"head|token": ["token", "head/kernel", "head/bias"],
    r".*/b\w+": ["net/conv_1/bias", "head/bias"],
}
CHOICES = [
    *((path(pattern), expected) for pattern, expected in GLOBS.items()),
    *((regex(pattern), expected) for pattern, expected in REGEXES.items()),
    (everything(), ALL),
    (layer("head"), ["head/kernel", "head/bias"]),
    (layer("net/norm"), ["net/norm/gamma", "net/norm/moving_mean"]),
    (layer("head", "norm"), [*ALL[4:6], *ALL[6:]]),
    (layer("norm"), ["net/norm/gamma", "net/norm/moving_mean"]),
    (layer_type("Dense"), ["head/kernel", "head/bias"]),
    (layer_type("BaseConv"), ["net/conv_1/kernel", "net/conv_1/bias", "net/conv_2/kernel"]),
    (layer_type("Dense", "BatchNormalization"), [*ALL[4:6], *ALL[6:]]),
    (layer_type("Functional"), ALL[1:6]),
    (layer_type(FakeLayer, "Dense"), ["head/kernel", "head/bias"]),
    (variable_name("kernel"), ["net/conv_1/kernel", "net/conv_2/kernel", "head/kernel"]),
    (variable_name("gamma", "bias"), ["net/conv_1/bias", "net/norm/gamma", "head/bias"]),
    (variable_name("gamma", "absent"), ["net/norm/gamma"]),
    (rank(2), ["head/kernel"]),
    (rank(min=2), ["net/conv_1/kernel", "net/conv_2/kernel", "head/kernel"]),
    (rank(min=2, max=3), ["head/kernel"]),
    (rank(7), []),
    (rank(max=0), []),
    (variables("token", "head/bias"), ["token", "head/bias"]),
    (where(lambda info: not info.trainable), ["net/norm/moving_mean"]),
    (where(lambda info: False), []),
    (xpath("//Dense"), ["head/kernel", "head/bias"]),
    (xpath("//Dense[@name='head']/variable[1]"), ["head/kernel"]),
    (xpath("//Conv2D[last()]"), ["net/conv_2/kernel"]),
    (xpath("//variable[@rank > 1][@trainable='true']"), [ALL[1], ALL[3], ALL[6]]),
    (xpath("//variable[@shape='(3, 4)']"), ["head/kernel"]),
    (xpath("//*[@path='net/norm']/preceding-sibling::*"), ALL[1:4]),
    (xpath("//*[matches(@name, '^conv_')]"), ALL[1:4]),
    (xpath("Dense | variable"), ["token", "head/kernel", "head/bias"]),
    (xpath("/model"), ALL),
    (default_exclude_from_decay, [*ALL[:1], ALL[2], *ALL[4:6], ALL[7]]),
    (xpath('//variable["a\\\\b" != @name]'), ALL),
    (path("head") | "token", ["token", "head/kernel", "head/bias"]),
    ("head" | path("token"), ["token", "head/kernel", "head/bias"]),
    (path("**/kernel") & "net", ["net/conv_1/kernel", "net/conv_2/kernel"]),
    ("net" & path("**/kernel"), ["net/conv_1/kernel", "net/conv_2/kernel"]),
    (path("head") - variable_name("bias"), ["head/kernel"]),
    ("head" - variable_name("bias"), ["head/kernel"]),
    (path("head") - "head/bias", ["head/kernel"]),
    (~path("net"), ["token", "head/kernel", "head/bias"]),
    (~(path("net") | "head"), ["token"]),
    (everything() - "net" - "head", ["token"]),
    (path("head") | ["token", "net/norm"], ["token", *ALL[4:]]),
    (~xpath("//Functional") & "**/kernel", ["head/kernel"]),
    ("net" - xpath("//Conv2D"), ALL[4:6]),
]


@pytest.mark.parametrize(("selector", "expected"), CHOICES, ids=lambda value: str(value)[:60])
def test_a_selector_chooses_and_comes_back_from_its_config_and_its_text(selector, expected):
    assert chosen(selector, MODEL) == expected
    if selector.is_serializable():
        again = Selector.from_config(json.loads(json.dumps(selector.get_config(MODEL))))
        assert again == selector
        assert hash(again) == hash(selector)
        for copy in (again, eval(selector.describe(), vars(selectors))):
            assert chosen(copy, MODEL) == expected
            assert copy.describe() == selector.describe()


ONLY_KERNELS = catalog("a/kernel", "b/kernel")
ODD = catalog("conv[1]/kernel", "conv1/kernel")
LORA = catalog(
    variable("d/kernel", trainable=False), "d/bias", "d/lora_kernel_a", "d/lora_kernel_b"
)
SHARED = catalog(
    variable("encoder/tied/kernel", aliases=("decoder/tied/kernel",)),
    "encoder/dense/kernel",
    "decoder/dense/kernel",
)
# Two towers of the same code: Keras gives `stem/kernel` twice.
TOWERS = catalog(
    variable("left/stem/kernel", keras_path="stem/kernel"),
    variable("left/out/kernel", keras_path="out/kernel"),
    variable("right/stem/kernel", keras_path="stem/kernel"),
    variable("head/kernel", keras_path="sequential/head/kernel"),
    variable("out/bias"),
)
TWO_DENSE = catalog("left/dense/kernel", "right/dense/kernel")
COUNTED_ANEW = catalog(variable("dense/kernel", raw_names={"dense": "dense_7"}))
WITHOUT_MODEL = catalog("stem/kernel", "head/kernel", provisional=True)
ELSEWHERE = [
    # The default exclusion may match nothing, and knows biases of rank 2.
    (default_exclude_from_decay, ONLY_KERNELS, []),
    (Selector.from_config(default_exclude_from_decay.get_config()), ONLY_KERNELS, []),
    (default_exclude_from_decay, catalog("q/kernel", variable("q/bias", shape=(2, 4))), ["q/bias"]),
    # The name of a layer is taken literally.
    (layer("conv[1]"), ODD, ["conv[1]/kernel"]),
    (path("conv[1]"), ODD, ["conv1/kernel"]),
    (path("conv[[]1]"), ODD, ["conv[1]/kernel"]),
    (layer("left/dense"), TWO_DENSE, ["left/dense/kernel"]),
    # Adapters are told from the kernel they adapt.
    (path("d/kernel"), LORA, ["d/kernel"]),
    (regex(".*/kernel"), LORA, ["d/kernel"]),
    (path("**/*kernel*"), LORA, ["d/kernel", "d/lora_kernel_a", "d/lora_kernel_b"]),
    (path("d/lora_*"), LORA, ["d/lora_kernel_a", "d/lora_kernel_b"]),
    # Each place of a shared variable counts.
    (path("decoder/tied"), SHARED, ["encoder/tied/kernel"]),
    (path("decoder/tied/kernel"), SHARED, ["encoder/tied/kernel"]),
    (path("decoder"), SHARED, ["encoder/tied/kernel", "decoder/dense/kernel"]),
    (path("encoder"), SHARED, ["encoder/tied/kernel", "encoder/dense/kernel"]),
    (regex("decoder/t.*"), SHARED, ["encoder/tied/kernel"]),
    (layer("decoder"), SHARED, ["encoder/tied/kernel", "decoder/dense/kernel"]),
    (variables("encoder/tied/kernel"), SHARED, ["encoder/tied/kernel"]),
    # A path of Keras counts where it names one variable, and widens no pattern that matches places.
    (path("sequential/head/kernel"), TOWERS, ["head/kernel"]),
    (path("sequential/head"), TOWERS, ["head/kernel"]),
    (path("*/kernel"), TOWERS, ["head/kernel"]),
    (path("out"), TOWERS, ["out/bias"]),
    (path("head"), WITHOUT_MODEL, ["head/kernel"]),
]


@pytest.mark.parametrize(("selector", "among", "expected"), ELSEWHERE)
def test_a_selector_chooses_among_names_that_are_hard_to_tell_apart(selector, among, expected):
    assert chosen(selector, among) == expected


TEXTS = [
    (path("a") | "b" | "c", 'path("a") | path("b") | path("c")'),
    (path("a") & "b" | "c", 'path("a") & path("b") | path("c")'),
    (path("a") & (path("b") | "c"), 'path("a") & (path("b") | path("c"))'),
    (~path("a") & "b", '~path("a") & path("b")'),
    (~(path("a") & "b"), '~(path("a") & path("b"))'),
    (path("a") - "b", 'path("a") & ~path("b")'),
    (~~path("a"), 'path("a")'),
    (path('a"b'), 'path("a\\"b")'),
    (everything() - regex(r"a\d"), 'everything() & ~regex("a\\\\d")'),
    (default_exclude_from_decay, 'rank(max=1) | variable_name("bias", "gamma", "beta")'),
]


@pytest.mark.parametrize(("selector", "text"), TEXTS, ids=lambda value: str(value)[:60])
def test_the_text_of_a_selector_is_code_that_makes_it(selector, text):
    assert repr(selector) == str(selector) == selector.describe() == text
    assert eval(text, vars(selectors)).describe() == text


CONFIGS = [
    (path("head"), {"selector": "path", "pattern": "head"}),
    (regex("head.*"), {"selector": "regex", "pattern": "head.*"}),
    (layer("head"), {"selector": "layer", "layers": ["head"]}),
    (layer_type("Dense"), {"selector": "layer_type", "names": ["Dense"]}),
    (variable_name("bias"), {"selector": "variable_name", "names": ["bias"]}),
    (rank(2), {"selector": "rank", "rank": 2}),
    (rank(min=1, max=2), {"selector": "rank", "min": 1, "max": 2}),
    (variables("token"), {"selector": "variables", "paths": ["token"]}),
    (everything(), {"selector": "everything"}),
    (xpath("//Dense"), {"selector": "xpath", "query": "//Dense"}),
    (~path("head"), {"selector": "not", "of": {"selector": "path", "pattern": "head"}}),
]


@pytest.mark.parametrize(("selector", "config"), CONFIGS, ids=lambda value: str(value)[:40])
def test_the_config_of_a_selector_is_plain_data(selector, config):
    assert selector.get_config() == config
    assert selector.is_serializable()


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (path("a"), path("b")),
        (path("a"), regex("a")),
        (rank(1), rank(max=1)),
        (variable_name("bias", "gamma", "beta"), default_exclude_from_decay),
        (path("a") | "b", path("a") & "b"),
        (path("a") | "b", path("b") | "a"),
        (~path("a"), path("a")),
        (path("a"), "a"),
    ],
    ids=str,
)
def test_selectors_that_are_written_differently_differ(left, right):
    assert left != right


# What can't be meant


BAD_PATTERNS = [
    (path, "", "not be empty"),
    (path, "/head", "between slashes.*Use 'head'"),
    (path, "head/", "between slashes.*Use 'head'"),
    (path, "net//kernel", "between slashes.*Use 'net/kernel'"),
    (path, "/", "between slashes"),
    (path, "net/conv**", "only as a level of its own"),
    (path, "***", "only as a level of its own"),
    (path, "net/conv_[12", r"close every `\[`"),
    (path, "net/[]", r"close every `\[`"),
    (path, "net/[a/b]", r"close every `\[`"),
    (path, "net/[z-a]", "be a valid glob.*bad character range"),
    (regex, "", "not be empty"),
    (regex, "conv_(1", "be a regular expression.*missing \\)"),
]


@pytest.mark.parametrize(("make", "pattern", "rule"), BAD_PATTERNS)
def test_a_bad_pattern_is_named_with_the_rule(make, pattern, rule):
    with pytest.raises(ValueError, match=f"`pattern` must .*{rule}") as caught:
        make(pattern)
    assert f"Received: pattern={pattern!r}." in str(caught.value)


NOTHING = [
    (path("haed"), r"path\(\"haed\"\).*matches none of 8.*Nearest paths: 'head'"),
    *((path("haed") | "head", "haed"), ("head" | path("haed"), "haed")),
    *((path("haed") & rank(7), "haed"), (rank(7) & path("haed"), "haed")),
    *((~path("haed"), "haed"), (everything() - path("haed"), "haed")),
    (~(rank(1) | (path("haed") & "head")), "haed"),
    (path("net/conv1"), "Nearest paths: 'net/conv_1'"),
    (path("conv_1"), "Nearest paths: 'net/conv_1'"),
    (path("NORM"), "Nearest paths: 'net/norm'"),
    (path("net/*/beta"), r"path\(\"net/\*/beta\"\).*Nearest paths: 'net'"),
    (path("net/**/kernl"), "Nearest paths: 'net/conv_2/kernel', 'net/conv_1/kernel'"),
    (path("zzzzzz"), "The model begins with 'token', 'net', 'head'"),
    (regex("hea"), "Nearest paths: 'head'"),
    (layer("heads"), "Nearest paths: 'head'"),
    (layer_type("Dens"), "Nearest classes: 'Dense'"),
    (layer_type("zzz"), "Known classes: 'BaseConv', 'BatchNormalization', 'Conv2D', 'Dense'"),
    (variable_name("kernels"), "Nearest last names: 'kernel'"),
    (variable_name("head/kernel"), r"use `path\(\"head/kernel\"\)`"),
    (
        variables("head/kernels"),
        "'head/kernels', which is none of its 8. Nearest paths: 'head/kernel'",
    ),
    (variables("token", "tokens"), "'tokens'"),
    (xpath("//Dense[@name='haed']"), r"matches none of 8\. Nearest paths: 'head'"),
    (xpath("//Dens[@name='head']"), "Nearest classes: 'Dense'"),
    (xpath("//variable[@rank=7]"), r"`print\(kgo\.to_xml\(model\)\)` shows the document"),
    (xpath("count(//Dense)"), "must find layers or variables, .*finds 1 .of type int"),
    (xpath("//Dense/@name"), r"finds 'head' .of type str.*//variable\[@rank > 1\]"),
    (xpath("//Dense[matches(@name, '[')]"), "the model can answer.*Invalid regular expression"),
    (xpath("doc('model.xml')"), "the model can answer.*Error retrieving resource"),
]


NOTHING_ELSEWHERE = [
    (layer("dense"), TWO_DENSE, "'left/dense', 'right/dense'.*" + re.escape('"**/dense"')),
    # Several variables share this path of Keras.
    (path("stem/kernel"), TOWERS, "'stem/kernel'.*'left/stem/kernel', 'right/stem/kernel'"),
    (path("stem"), TOWERS, "'stem'.*'left/stem/kernel', 'right/stem/kernel'"),
    (path("st*"), TOWERS, r"'st\*'.*'left/stem/kernel', 'right/stem/kernel'"),
    (path("dense_7"), COUNTED_ANEW, "Nearest paths: 'dense'.*'dense_7' are counted anew"),
    (layer("dense_7"), COUNTED_ANEW, "Nearest paths: 'dense'.*'dense_7' are counted anew"),
    (path("backbone/stem"), WITHOUT_MODEL, "[pP]ass `model=`"),
    (regex("backbone.*"), WITHOUT_MODEL, "[pP]ass `model=`"),
    (layer("backbone"), WITHOUT_MODEL, "[pP]ass `model=`"),
    (layer_type("Dense"), WITHOUT_MODEL, "[pP]ass `model=`"),
]


@pytest.mark.parametrize(
    ("selector", "among", "message"),
    [*((selector, MODEL, message) for selector, message in NOTHING), *NOTHING_ELSEWHERE],
)
def test_a_selector_that_matches_nothing_shows_the_nearest(selector, among, message):
    with pytest.raises(ValueError, match=message):
        selector.resolve(among)


def test_a_path_of_keras_with_an_automatic_name_is_used_with_a_warning():
    automatic = (("left/dense", "dense"), ("right/dense", "dense_1"))
    among = catalog(
        *(
            variable(f"{at}/kernel", raw_names={at: name}, keras_path=f"{name}/kernel")
            for at, name in automatic
        )
    )
    with pytest.warns(UserWarning, match="'dense_1/kernel'.*Use the layer path 'right/dense/kern"):
        assert chosen("dense_1/kernel", among) == ["right/dense/kernel"]


BAD_ARGUMENTS = [
    (lambda: path(3), TypeError, "`pattern` must be a string.*type int"),
    (lambda: rank(), ValueError, "must be given one number.*Received: nothing"),
    (lambda: rank(1, min=1), ValueError, "Received: rank=1, min=1"),
    (lambda: rank(-1), ValueError, "`rank` must be a whole number >= 0. Received: rank=-1"),
    (lambda: rank(min=1.5), ValueError, "`min` must be a whole number.*min=1.5"),
    (lambda: rank(True), ValueError, "`rank` must be a whole number.*rank=True"),
    (lambda: rank(min=3, max=1), ValueError, "`min` must be at most `max`"),
    (lambda: variable_name(), ValueError, "`variable_name` must be given at least one name"),
    (lambda: variable_name(["bias"]), TypeError, "must be given last names.*type list"),
    (lambda: layer_type(), ValueError, "`layer_type` must be given at least one name"),
    (lambda: layer_type(3), TypeError, "must be given class names or classes.*type int"),
    (lambda: variables(), ValueError, "at least one variable"),
    (lambda: variables(3), TypeError, "Keras variables or their exact layer paths.*type int"),
    (lambda: layer(3), TypeError, "`layer` must be a Keras layer, or the name.*type int"),
    (lambda: layer(FakeLayer), TypeError, "`layer` must be a Keras layer"),
    (lambda: layer(), ValueError, "at least one layer"),
    (lambda: layer(""), ValueError, "`layer` must not be empty"),
    (lambda: xpath(3), TypeError, "`query` must be a string.*type int"),
    (lambda: xpath(""), ValueError, "`query` must be an XPath 2.0 query.*source is empty"),
    (lambda: xpath("//Dense]"), ValueError, "query='//Dense]', .* line 1, column 8: unexpected"),
    (lambda: xpath("//Dense[nme()]"), ValueError, "column 9: unknown function 'nme'"),
    (lambda: xpath("//k:Dense"), ValueError, "column 4: prefix 'k' is not declared"),
    (lambda: xpath("unparsed-text('/a')"), ValueError, "unknown function 'unparsed-text'"),
    (lambda: where("head"), TypeError, "`function` must be a function that takes.*type str"),
    (lambda: where(path("head")), TypeError, "`function` must be a function that takes"),
    (lambda: as_selector(None, "exclude"), TypeError, "`exclude` must be a layer path.*NoneType"),
    (lambda: as_selector({"head"}), TypeError, "`selector` must be a layer path.*type set"),
    (lambda: as_selector([]), ValueError, "`selector` must not be empty"),
    (lambda: as_selector(len), TypeError, r"use `where\(function\)`"),
    (lambda: as_selector(FakeLayer), TypeError, r'use `layer_type\("FakeLayer"\)`'),
    (lambda: path("head") | 3, TypeError, "must be a layer path.*type int"),
    (lambda: Selector.from_config({"selector": "paths"}), ValueError, "'selector' that is one of"),
    (lambda: Selector.from_config({"selector": "path"}), ValueError, "what `get_config` returned"),
    (lambda: Selector.from_config({"selector": "or"}), ValueError, "what `get_config` returned"),
    (lambda: Selector.from_config("head"), ValueError, "'selector' that is one of"),
]


@pytest.mark.parametrize(("make", "error", "message"), BAD_ARGUMENTS)
def test_a_bad_argument_gets_the_rule_and_what_was_received(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_a_name_that_reads_as_a_wildcard_is_answered_with_what_matches_it():
    among = catalog(variable("block[1]/kernel"), variable("head/kernel"))
    with pytest.raises(ValueError, match=r"wildcards: .* write 'block\[\[\]1\]'") as caught:
        path("block[1]").resolve(among)
    advised = str(caught.value).split("write ")[1].strip("'.")
    assert chosen(path(advised), among) == ["block[1]/kernel"]


# Objects


def test_layers_and_variables_are_chosen_by_identity_and_written_only_with_a_catalog():
    kernel, bias, twin = (FakeVariable(name) for name in ("a/kernel", "a/bias", "b/kernel"))
    among = holding(kernel, bias, twin)
    layer_a = layer(FakeLayer("a", kernel, bias))
    assert chosen(layer_a, among) == ["a/kernel", "a/bias"]
    assert layer_a.describe() == 'layer("a")'
    selector = variables(twin)
    assert chosen(selector, among) == ["b/kernel"]
    assert selector.get_config(among) == {"selector": "variables", "paths": ["b/kernel"]}
    assert selector == variables(twin) == as_selector(twin) != variables(kernel)
    with pytest.raises(ValueError, match="'c/kernel', which is none of its 3"):
        variables(kernel, FakeVariable("c/kernel")).resolve(among)
    for held in (layer_a, selector):
        assert held.is_serializable()
        with pytest.raises(ValueError, match="Pass the catalog"):
            held.get_config()


def test_a_layer_that_is_no_layer_of_the_model_is_written_as_its_variables():
    kernel, bias = FakeVariable("a/kernel"), FakeVariable("a/bias")
    config = layer(FakeLayer("view", bias)).get_config(holding(kernel, bias))
    assert config == {"selector": "layer", "layers": [], "variables": ["a/bias"]}
    assert chosen(Selector.from_config(config), holding(kernel, bias)) == ["a/bias"]


def test_a_layer_of_another_model_or_without_weights_is_an_error():
    among = holding(FakeVariable("a/kernel"))
    with pytest.raises(ValueError, match=r"layer='a', which has none of its 1.*Was it copied"):
        layer(FakeLayer("a", FakeVariable("a/kernel"))).resolve(among)
    with pytest.raises(ValueError, match=r"layer='a', which has none.*It has no weights: build it"):
        layer(FakeLayer("a")).resolve(among)


def test_of_several_layers_some_may_never_have_weights():
    kernel = FakeVariable("a/kernel")
    flatten, dense = FakeLayer("flatten"), FakeLayer("dense", kernel)
    selector = as_selector([flatten, dense, flatten])
    assert selector.describe() == 'layer("flatten", "dense", "flatten")'
    assert chosen(selector, holding(kernel)) == ["a/kernel"]
    with pytest.raises(ValueError, match="must match at least one variable"):
        as_selector([flatten, flatten]).resolve(holding(kernel))
    flatten.built = False
    with pytest.raises(ValueError, match=r"layer='flatten'.*build it first"):
        selector.resolve(holding(kernel))


def test_lists_of_layers_and_paths_mean_any_of_them():
    first, second, third = (FakeVariable(f"{name}/kernel") for name in "abc")
    value = [FakeLayer("a", first), [FakeLayer("b", second), "c"]]
    among = holding(first, second, third)
    assert chosen(as_selector(value), among) == list(among.paths)
    assert as_selector(["a"]) == as_selector(("a",)) == path("a")


# Functions


def is_bias(info: VariableInfo) -> bool:
    return info.name == "bias"


def test_a_function_is_written_through_the_serializer_alone(monkeypatch):
    # Both are put back at the end.
    monkeypatch.setattr(by_object, "_serialize", None)
    monkeypatch.setattr(by_object, "_deserialize", None)
    assert not where(is_bias).is_serializable()
    with pytest.raises(ValueError, match=r"`where\(is_bias\)` holds a Python function"):
        where(is_bias).get_config()
    with pytest.raises(ValueError, match="Received: function='is_bias'"):
        Selector.from_config({"selector": "where", "function": "is_bias"})

    def serialize(function):
        if function is not is_bias:
            raise ValueError("unknown function")
        return "is_bias"

    set_function_serializer(serialize, {"is_bias": is_bias}.__getitem__)
    selector = path("head") & where(is_bias)
    assert selector.is_serializable()
    assert Selector.from_config(json.loads(json.dumps(selector.get_config()))) == selector
    assert not (path("head") & ~where(len)).is_serializable()


# The catalog


def test_two_variables_of_one_path_are_refused():
    with pytest.raises(ValueError, match=r"distinct paths. Received twice: \['a/kernel'\]"):
        catalog("a/kernel", "b/kernel", "a/kernel")


def test_selectors_work_on_ten_thousand_variables():
    names = ("kernel", "bias")
    large = catalog(*(f"stage_{s}/d{d}/{n}" for s in range(100) for d in range(50) for n in names))
    assert len(large) == 10_000
    groups = [path(f"stage_{stage}") - rank(max=1) for stage in range(100)]
    found = [group.resolve(large) for group in groups]
    assert [len(positions) for positions in found] == [50] * 100
    assert frozenset().union(*found) == rank(min=2).resolve(large)
    assert len(path("stage_1?/**/bias").resolve(large)) == 500
    with pytest.raises(ValueError, match="'stage_77/d3'"):
        path("stag_77/d3").resolve(large)
