"""torch's `param_groups` as a `GroupedOptimizer`, against torch itself."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import keras_groupopt as kgo

torch = pytest.importorskip("torch")

STEPS = 20


def two_layers():
    keras.utils.set_random_seed(3)
    layers = [
        keras.Input((4,)),
        keras.layers.Dense(5, name="body"),
        keras.layers.Dense(2, name="head"),
    ]
    return keras.Sequential(layers)


def gradients(model, step):
    random = np.random.default_rng(step)
    return [random.normal(size=v.shape).astype("float32") for v in model.trainable_variables]


def weights(variables):
    return [np.array(keras.ops.convert_to_numpy(v)) for v in variables]


def trained_here(optimizer, model):
    for step in range(STEPS):
        values = [keras.ops.convert_to_tensor(g) for g in gradients(model, step)]
        optimizer.apply(values, model.trainable_variables)
    return weights(model.trainable_variables)


def trained_by_torch(cls, groups, model, **arguments):
    """Groups as dicts whose `params` are places among the model's variables."""
    values = [torch.nn.Parameter(torch.tensor(w)) for w in weights(model.trainable_variables)]
    entries = [{**group, "params": [values[i] for i in group["params"]]} for group in groups]
    optimizer = cls(entries, **arguments)
    for step in range(STEPS):
        for value, gradient in zip(values, gradients(model, step), strict=True):
            value.grad = torch.tensor(gradient)
        optimizer.step()
    return [value.detach().numpy() for value in values]


RUNS = {
    "AdamW": (
        "adamw",
        [
            {"params": [0, 1], "lr": 1e-3, "betas": (0.8, 0.95)},
            {"params": [2, 3], "weight_decay": 0.0},
        ],
        {"lr": 1e-2, "weight_decay": 0.1},
    ),
    "AdamW as it is": ("adamw", [{"params": [0, 1, 2, 3]}], {}),
    "Adam with AMSGrad": (
        "adam",
        [{"params": [0, 2], "amsgrad": True}, {"params": [1, 3], "betas": (0.85, 0.99)}],
        {"lr": 1e-2},
    ),
    "SGD": (
        "sgd",
        [
            {"params": [0, 1], "lr": 0.01, "weight_decay": 0.1},
            {"params": [2, 3], "momentum": 0.9, "nesterov": True},
        ],
        {"lr": 0.1},
    ),
    "SGD without a common rate": (
        "sgd",
        [{"params": [0], "lr": 0.01}, {"params": [1, 2, 3], "lr": 0.1}],
        {},
    ),
    "RAdam": ("radam", [{"params": [0, 1], "lr": 1e-3}, {"params": [2, 3]}], {"lr": 1e-2}),
    "Adagrad": ("adagrad", [{"params": [0, 1, 2, 3]}], {"eps": 1e-6}),
    "RMSprop": (
        "rmsprop",
        [{"params": [0, 1], "alpha": 0.9}, {"params": [2, 3], "momentum": 0.5}],
        {},
    ),
    "NAdam": (
        "nadamw",
        [{"params": [0, 1], "lr": 1e-3, "decoupled_weight_decay": True}, {"params": [2, 3]}],
        {"lr": 1e-2, "weight_decay": 0.1, "decoupled_weight_decay": True},
    ),
}
CLASSES = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "adagrad": torch.optim.Adagrad,
    "radam": torch.optim.RAdam,
    "rmsprop": torch.optim.RMSprop,
    "nadamw": torch.optim.NAdam,
}


@pytest.mark.parametrize(("rule", "groups", "arguments"), RUNS.values(), ids=RUNS)
def test_it_trains_as_torch_does(rule, groups, arguments):
    model = two_layers()
    theirs = trained_by_torch(CLASSES[rule], groups, model, **arguments)
    variables = model.trainable_variables
    entries = [{**group, "params": [variables[i] for i in group["params"]]} for group in groups]
    ours = trained_here(kgo.from_param_groups(entries, model, rule, **arguments), model)
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-6, atol=2e-6)


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


BAD = {
    "an unknown key": ([{"params": "body", "weight_decey": 0.1}], {}, ValueError, "`weight_decay`"),
    "our name for a key": ([{"params": "body", "epsilon": 1.0}], {}, ValueError, "`eps`"),
    "one of the betas": ([{"params": "body", "beta_1": 0.9}], {}, ValueError, "`betas`"),
    "dampening": (
        [{"params": "**", "dampening": 0.1}],
        {"rule": "sgd"},
        ValueError,
        "`dampening` must not be set",
    ),
    "maximize": ([{"params": "**"}], {"maximize": True}, ValueError, "Negate the loss"),
    "a coupled decay": (
        [{"params": "**", "weight_decay": 0.1}],
        {"rule": "adam"},
        ValueError,
        "must be decoupled",
    ),
    "three betas": ([{"params": "**", "betas": (0.9, 0.9, 0.9)}], {}, ValueError, "2 numbers"),
    "a negative rate": ([{"params": "**", "lr": -1.0}], {}, ValueError, "finite number >= 0"),
    "no parameters": ([{"lr": 0.1}], {}, ValueError, "`params` must be given"),
    "empty groups": ([{"params": []}], {}, ValueError, "must have parameters"),
    "a weight of another model": (
        [{"params": [keras.Variable(1.0)]}],
        {},
        ValueError,
        "weights of `model`",
    ),
    "a tensor": ([{"params": [np.ones(3)]}], {}, ValueError, "no weight of it"),
    "a name that is none": ([{"params": "**", "name": ["a"]}], {}, TypeError, "must be a string"),
    "one name twice": (
        [{"params": "body", "name": "a"}, {"params": "head", "name": "a"}],
        {},
        ValueError,
        "must be unique",
    ),
    "a layer left out": ([{"params": "body"}], {}, ValueError, "head/kernel"),
    "a path that is none": ([{"params": "boddy"}], {}, ValueError, "body"),
    "dicts and parameters": ([{"params": "body"}, "head"], {}, TypeError, "must hold dicts"),
    "an optimizer": (
        torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]),
        {},
        TypeError,
        "Pass its `param_groups`",
    ),
    "an instance as rule": (
        [{"params": "**"}],
        {"rule": keras.optimizers.SGD(0.1)},
        TypeError,
        "`rule` must be a name",
    ),
}


@pytest.mark.parametrize(("groups", "arguments", "error", "said"), BAD.values(), ids=BAD)
def test_what_has_no_counterpart_is_refused(groups, arguments, error, said):
    with pytest.raises(error) as caught:
        kgo.from_param_groups(groups, two_layers(), **arguments)
    assert said in str(caught.value)
