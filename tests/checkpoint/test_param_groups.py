"""torch's `param_groups` as a `GroupedOptimizer`, against torch itself."""

from __future__ import annotations

import keras
import models
import numpy as np
import pytest
from bad_input import pattern, rows
from saving_models import gradients, train

import keras_groupopt as kgo

torch = pytest.importorskip("torch")

STEPS = 20


def two_layers():
    return models.dense(body=5, head=2)


def trained_by_torch(cls, groups, model, **arguments):
    """Groups as dicts whose `params` are places among the model's variables."""
    values = [torch.nn.Parameter(torch.tensor(w)) for w in model.get_weights()]
    entries = [{**group, "params": [values[i] for i in group["params"]]} for group in groups]
    optimizer = cls(entries, **arguments)
    for step in range(STEPS):
        for value, gradient in zip(values, gradients(model, step), strict=True):
            value.grad = torch.tensor(gradient.astype("float32"))
        optimizer.step()
    return [value.detach().numpy() for value in values]


def body(**options):
    return {"params": [0, 1], **options}


def head(**options):
    return {"params": [2, 3], **options}


ALL = {"params": [0, 1, 2, 3]}
SLOW, FAST = {"lr": 1e-3}, {"lr": 1e-2}
DECOUPLED = {"decoupled_weight_decay": True}
RUNS = {
    "AdamW": (
        "adamw",
        [body(betas=(0.8, 0.95), **SLOW), head(weight_decay=0.0)],
        FAST | {"weight_decay": 0.1},
    ),
    "AdamW as it is": ("adamw", [ALL], {}),
    "Adam with AMSGrad": (
        "adam",
        [{"params": [0, 2], "amsgrad": True}, {"params": [1, 3], "betas": (0.85, 0.99)}],
        FAST,
    ),
    "SGD": (
        "sgd",
        [body(lr=0.01, weight_decay=0.1), head(momentum=0.9, nesterov=True)],
        {"lr": 0.1},
    ),
    "SGD without a common rate": (
        "sgd",
        [{"params": [0], "lr": 0.01}, {"params": [1, 2, 3], "lr": 0.1}],
        {},
    ),
    "RAdam": ("radam", [body(**SLOW), head()], FAST),
    "Adagrad": ("adagrad", [ALL], {"eps": 1e-6}),
    "RMSprop": ("rmsprop", [body(alpha=0.9), head(momentum=0.5)], {}),
    "NAdam": (
        "nadamw",
        [body(**SLOW, **DECOUPLED), head()],
        FAST | DECOUPLED | {"weight_decay": 0.1},
    ),
}
NAMES = ("AdamW", "Adam", "SGD", "Adagrad", "RAdam", "RMSprop", "NAdam")
CLASSES = {name.lower(): getattr(torch.optim, name) for name in NAMES}
CLASSES["nadamw"] = CLASSES.pop("nadam")


@pytest.mark.parametrize(("rule", "groups", "arguments"), RUNS.values(), ids=RUNS)
def test_it_trains_as_torch_does(rule, groups, arguments):
    model = two_layers()
    theirs = trained_by_torch(CLASSES[rule], groups, model, **arguments)
    variables = model.trainable_variables
    entries = [{**group, "params": [variables[i] for i in group["params"]]} for group in groups]
    model.compile(kgo.from_param_groups(entries, model, rule, **arguments), loss="mse")
    models.assert_equal(train(model, STEPS).get_weights(), theirs, rtol=2e-6, atol=5e-6)


def test_params_may_be_layers_paths_and_selectors():
    model = two_layers()
    optimizer = kgo.from_param_groups(
        [
            {"params": [model.get_layer("body")], "lr_scale": 0.5, "name": "body"},
            {"params": "head/kernel"},
            {"params": kgo.path("head") & kgo.variable_name("bias"), "lr": 1e-4},
        ],
        model,
        lr=1e-3,
    )
    found = {
        g.name: ([v.path for v in g.variables], g.group.learning_rate_ratio)
        for g in optimizer.plan.groups
    }
    assert found["body"] == (["body/kernel", "body/bias"], 0.5)
    assert found["group_1"] == (["head/kernel"], 1.0)
    assert found["group_2"][0] == ["head/bias"]
    assert np.isclose(found["group_2"][1], 0.1)


def test_a_bare_list_is_one_group_and_options_of_the_whole_hold():
    model = two_layers()
    optimizer = kgo.from_param_groups(
        model.trainable_variables, model, "sgd", lr=0.1, global_clipnorm=1.0, fused=True
    )
    assert [group.name for group in optimizer.plan.groups] == ["group_0"]
    assert optimizer.global_clipnorm == 1.0


def test_a_schedule_is_the_base_and_lr_scale_the_ratio():
    model = two_layers()
    optimizer = kgo.from_param_groups(
        [{"params": "body", "lr_scale": 0.1}, {"params": "head"}],
        model,
        lr=keras.optimizers.schedules.CosineDecay(1e-3, 100),
    )
    rates = [group["learning_rate"] for group in optimizer.plan.to_dict()["groups"]]
    assert rates == ["CosineDecay × 0.1", "CosineDecay"]


@pytest.mark.backends("torch", reason="their weights are torch parameters")
def test_the_groups_of_a_torch_optimizer_of_the_model_are_taken():
    model = two_layers()
    body, head = model.get_layer("body"), model.get_layer("head")
    groups = [{"params": list(body.parameters()), "lr": 1e-4}, {"params": list(head.parameters())}]
    theirs = torch.optim.AdamW(groups, lr=1e-3)
    optimizer = kgo.from_param_groups(theirs.param_groups, model)
    ratios = [group.group.learning_rate_ratio for group in optimizer.plan.groups]
    np.testing.assert_allclose(ratios, [0.1, 1.0])


@pytest.mark.backends("torch", reason="their weights are torch parameters")
@pytest.mark.parametrize("rule", CLASSES)
def test_a_torch_optimizer_as_it_is_made_is_taken_with_all_its_keys(rule):
    model = two_layers()
    theirs = CLASSES[rule](model.parameters())
    optimizer = kgo.from_param_groups(theirs.param_groups, model, rule)
    optimizer.build(model.trainable_variables)
    assert float(optimizer.learning_rate) == np.float32(theirs.defaults["lr"])


def everything(**options):
    return [{"params": "**", **options}]


def taking(groups, rule="adamw", **options):
    return lambda model: kgo.from_param_groups(groups, model, rule, **options)


BAD = [
    *rows(
        ValueError,
        (taking([{"params": "body", "weight_decey": 0.1}]), "`weight_decay`"),
        (taking([{"params": "body", "epsilon": 1.0}]), "`eps`"),
        (taking([{"params": "body", "beta_1": 0.9}]), "`betas`"),
        (
            taking(everything(dampening=0.1), "sgd"),
            "`dampening` must not be set",
        ),
        (taking(everything(), maximize=True), "Negate the loss"),
        (taking(everything(weight_decay=0.1), "adam"), "must be decoupled"),
        (taking(everything(betas=(0.9, 0.9, 0.9))), "2 numbers"),
        (taking(everything(lr=-1.0)), "finite number >= 0"),
        (taking([{"lr": 0.1}]), "`params` must be given"),
        (taking([{"params": []}]), "must have parameters"),
        (taking([{"params": [keras.Variable(1.0)]}]), "weights of `model`"),
        (taking([{"params": [np.ones(3)]}]), "not a weight of"),
        (
            taking([{"params": p, "name": "a"} for p in ("body", "head")]),
            "must be unique",
        ),
        (taking([{"params": "body"}]), "head/kernel"),
        (taking([{"params": "boddy"}]), "body"),
    ),
    *rows(
        TypeError,
        (taking(everything(name=["a"])), "must be a string"),
        (taking([{"params": "body"}, "head"]), "must hold dicts"),
        (
            taking(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])),
            "Pass its `param_groups`",
        ),
        (taking(everything(), keras.optimizers.SGD(0.1)), "`rule` must be a na"),
    ),
]


@pytest.mark.parametrize(("call", "error", "text"), BAD)
def test_what_has_no_counterpart_is_refused(call, error, text):
    with pytest.raises(error, match=pattern(text)):
        call(two_layers())
