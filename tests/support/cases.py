"""The table of cases that `test_contracts.py` crosses with the contracts.

A row says what is trained (a rule, or options of the whole), what it must equal (the float64
reference, plain Keras) and what it can do. A new rule or option is one row, and gets every
contract. Gradients are given, so that each number has one cause.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import references
from grouped_reference import ReferenceGroup, grouped_step, make_rules
from models import numpy_of
from own_rules import table

import keras_groupopt as kgo

Arrays = Mapping[str, np.ndarray]

# Powers of two: a rate times a ratio times a decay is exact, so that equal can mean bit for bit.
RATE = 0.0625
DECAY = 0.5
RATIOS = {"backbone": 0.5, "head": 1.0}

SHAPES = {
    "backbone/kernel": (3, 4),
    "backbone/bias": (4,),
    "head/kernel": (4, 3),
    "head/bias": (3,),
    "head/gain": (),
}
PATHS = tuple(SHAPES)
PARTS = tuple(RATIOS)


# The model ------------------------------------------------------------------------------------


@keras.saving.register_keras_serializable(package="groupopt_tests")
class Part(keras.layers.Layer):
    """Weights of rank 2, 1 and, if it has a gain, 0: x ↦ gain · (x @ kernel) + bias."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.shapes = dict(shapes)

    def build(self, shape: Any) -> None:
        for name, own in self.shapes.items():
            setattr(self, name, self.add_weight(tuple(own), initializer="ones", name=name))
        self.built = True

    def call(self, x: Any) -> Any:
        return getattr(self, "gain", 1.0) * keras.ops.matmul(x, self.kernel) + self.bias


@keras.saving.register_keras_serializable(package="groupopt_tests")
class Towers(keras.Model):
    """A backbone and a head."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        for part in PARTS:
            shapes = {p.split("/")[1]: s for p, s in SHAPES.items() if p.startswith(part)}
            setattr(self, part, Part(shapes, name=part, dtype=self.dtype_policy))

    def build(self, shape: Any) -> None:
        for part in PARTS:
            getattr(self, part).build(None)
        self.built = True

    def call(self, x: Any) -> Any:
        return self.head(self.backbone(x))


def make_model(dtype: str = "float32") -> Any:
    """The towers, with the same values every time."""
    model = Towers(dtype=dtype)
    model.build((None, SHAPES["backbone/kernel"][0]))
    for path, value in initial_weights().items():
        by_path(model)[path].assign(value)
    return model


def by_path(model: Any) -> dict[str, Any]:
    """The model's trainable variables, in order, under `part/name`."""
    places = {id(getattr(getattr(model, p.split("/")[0]), p.split("/")[1])): p for p in PATHS}
    return {places[id(variable)]: variable for variable in model.trainable_variables}


def initial_weights() -> dict[str, np.ndarray]:
    """Values away from zero, as some rules scale by the size of the weights."""
    return dict(_INITIAL)


def gradients(step: int) -> dict[str, np.ndarray]:
    """Gradients whose size changes from step to step and from variable to variable."""
    random = np.random.default_rng(100 + step)
    size = (0.5, 2.0, 1.0)[step % 3]
    return {
        path: np.asarray(size * (3.0 if len(s) == 2 else 1.0) * random.normal(size=s), "float32")
        for path, s in SHAPES.items()
    }


def _initial_weights() -> dict[str, np.ndarray]:
    random = np.random.default_rng(7)
    return {
        path: np.asarray(
            random.uniform(0.25, 1.0, shape) * random.choice([1.0, -1.0], shape), "float32"
        )
        for path, shape in SHAPES.items()
    }


_INITIAL = _initial_weights()


def weights_of(model: Any) -> dict[str, np.ndarray]:
    """The present values, by path."""
    return {path: numpy_of(variable) for path, variable in by_path(model).items()}


def tensors_of(values: Mapping[str, np.ndarray | None], variables: Mapping[str, Any]) -> list[Any]:
    """Gradients as tensors, one per variable and in its dtype."""
    return [
        None if values[path] is None else keras.ops.convert_to_tensor(values[path], dtype=v.dtype)
        for path, v in variables.items()
    ]


def take_step(
    optimizer: Any,
    model: Any,
    values: Mapping[str, np.ndarray | None],
    parts: Collection[str] = PARTS,
) -> None:
    """One eager step of the variables of some parts with these gradients."""
    variables = {p: v for p, v in by_path(model).items() if p.split("/")[0] in parts}
    optimizer.apply(tensors_of(values, variables), list(variables.values()))


def make_optimizer(rule: Any = "adam", **options: Any) -> kgo.GroupedOptimizer:
    """An optimizer without a model that pulls weights to where they started."""
    options = {"learning_rate": RATE, "weight_decay": DECAY, "anchor": "initial"} | options
    return kgo.GroupedOptimizer(rule=rule, **options)


def trained(optimizer: Any, steps: Iterable[int] = range(4)) -> dict[str, np.ndarray]:
    """The weights of new towers after some steps of an optimizer that has no model yet."""
    model = make_model()
    optimizer.bind(model)
    for step in steps:
        take_step(optimizer, model, gradients(step))
    return weights_of(model)


# Rules and rates of tests ---------------------------------------------------------------------


@keras.saving.register_keras_serializable(package="groupopt_tests")
class PeakMomentum(keras.optimizers.Optimizer):
    """What a third party might write: one slot, and one variable of the rule as a whole.

    v ← m v + g;  w ← w - η v;  peak ← max(peak, max |g|)
    """

    def __init__(self, learning_rate: Any = 0.01, decay: float = 0.5, **kwargs: Any) -> None:
        super().__init__(learning_rate=learning_rate, **kwargs)
        self.decay = decay

    def build(self, variables: Any) -> None:
        if self.built:
            return
        super().build(variables)
        self.speeds = self.add_optimizer_variables(variables, "speed")
        self.peak = self.add_variable((), name="peak", initializer="zeros")

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        ops = keras.ops
        speed = self.speeds[self._get_variable_index(variable)]
        gradient = ops.cast(ops.reshape(gradient, variable.shape), variable.dtype)
        self.assign(speed, ops.add(ops.multiply(speed, self.decay), gradient))
        self.assign_sub(variable, ops.multiply(speed, ops.cast(learning_rate, variable.dtype)))
        largest = ops.cast(ops.max(ops.abs(gradient)), self.peak.dtype)
        self.assign(self.peak, ops.maximum(self.peak, largest))

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "decay": self.decay}


class PeakMomentumReference(references.Rule):
    """`PeakMomentum` in float64."""

    def start(self, w: np.ndarray) -> None:
        self.v = np.zeros_like(w)

    def move(self, w: np.ndarray, g: np.ndarray, learning_rate: float) -> np.ndarray:
        self.v = 0.5 * self.v + g
        return w - learning_rate * self.v


@keras.saving.register_keras_serializable(package="groupopt_tests")
def quarter_rate() -> float:
    """A base rate that is a function."""
    return RATE / 4


@keras.saving.register_keras_serializable(package="groupopt_tests")
class Jump(keras.optimizers.schedules.LearningRateSchedule):
    """`first` before step `at`, then `then`."""

    def __init__(self, first: float, then: float, at: int = 3) -> None:
        self.first, self.then, self.at = first, then, at

    def __call__(self, step: Any) -> Any:
        step = keras.ops.convert_to_tensor(step)
        return keras.ops.where(step < self.at, self.first, self.then)

    def get_config(self) -> dict[str, Any]:
        return {"first": self.first, "then": self.then, "at": self.at}


def stairs(value: float) -> Any:
    """A schedule that halves `value` after step 1, and again after step 4."""
    values = [value, value / 2, value / 4]
    return keras.optimizers.schedules.PiecewiseConstantDecay([1, 4], values)


def stairs_at(value: float) -> Callable[[int], float]:
    """`stairs` in float64."""
    return lambda step: value if step <= 1 else value / 2 if step <= 4 else value / 4


@dataclasses.dataclass(frozen=True)
class Rate:
    """How the rate of a group with a ratio is declared, and what it must be.

    Args:
        base: The base rate of the GroupedOptimizer.
        group: From a ratio to what the group says.
        alone: From a ratio to the rate of a stand-alone optimizer that must move the same.
        at: The rate at ratio 1 and a step, in float64.
    """

    base: Any = RATE
    group: Callable[[float], dict[str, Any]] = lambda ratio: {"learning_rate_ratio": ratio}
    alone: Callable[[float], Any] = lambda ratio: RATE * ratio
    at: Callable[[int], float] = lambda step: RATE


# Rows -----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """One row.

    Args:
        name: The row's name in test ids.
        rule: The rule of all groups.
        reference: Makes the float64 rule of one variable.
        keras_class: The class that a group must equal; `None` where plain Keras has no such
            option.
        arguments: Arguments of the rule, for any way of giving it.
        keras_arguments: More arguments of plain Keras: the row's options in its spelling, or what
            switches off a decay that the class has by default.
        decay_arguments: The names under which `keras_class` takes a decay.
        rate: How the rate is declared.
        whole: Options of the GroupedOptimizer.
        group: Options of each group, by its name.
        expected: The same options for the reference, by the group's name.
        expected_limit: `global_clipnorm` of all groups, for the reference.
        loss_scale: What gradients are multiplied by before they are given.
        as_instance: Whether each group gets an optimizer instance, which brings its rate.
        separable: Whether a group moves as if the other were not there.
        config_is_whole: Whether the config alone makes an optimizer that steps.
        exact: Whether plain Keras' numbers come out bit for bit, or to rounding.
        named: Whether the name of `keras_class` means it.
        fusible: Whether a fused step may stand for the row's rule on some backend.
        low_precision_faults: Why Keras' own rule fails, on which backend and dtype.
        tolerance: Of the reference, relative and absolute.
    """

    name: str
    rule: Any = "adam"
    reference: Callable[[], references.Rule] = references.Adam
    keras_class: type | None = keras.optimizers.Adam
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    keras_arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    decay_arguments: Sequence[str] = ("weight_decay",)
    rate: Rate = dataclasses.field(default_factory=Rate)
    whole: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    group: Callable[[str], Mapping[str, Any]] = lambda part: {}
    expected: Callable[[str], Mapping[str, Any]] = lambda part: {}
    expected_limit: float | None = None
    loss_scale: float = 1.0
    as_instance: bool = False
    separable: bool = True
    config_is_whole: bool = True
    exact: bool = True
    named: bool = True
    fusible: bool = True
    low_precision_faults: Mapping[tuple[str, str], str] = dataclasses.field(default_factory=dict)
    tolerance: float = 1e-5

    def optimizer(
        self,
        model: Any,
        ratios: Mapping[str, float] | None = None,
        frozen: Collection[str] = (),
        **options: Any,
    ) -> kgo.GroupedOptimizer:
        """The row's optimizer, with one group per part of the model.

        Args:
            model: From `make_model`.
            ratios: The ratio of each part.
            frozen: Parts whose group is frozen.
            **options: More options of the GroupedOptimizer.
        """
        groups = [
            kgo.Group(part, part, frozen=True)
            if part in frozen
            else kgo.Group(part, part, **self.group_options(part, ratio))
            for part, ratio in (ratios or RATIOS).items()
        ]
        return self.grouped(groups, model=model, **options)

    def grouped(self, groups: Any, **options: Any) -> kgo.GroupedOptimizer:
        """The row's optimizer with these groups."""
        return kgo.GroupedOptimizer(
            groups,
            **{"rule": self.rule, "learning_rate": self.rate.base, **self.whole, **options},
        )

    def group_options(self, part: str, ratio: float) -> dict[str, Any]:
        """What a group of this row says, its rate among it."""
        if self.as_instance:
            return {"rule": self.plain(ratio), **self.group(part)}
        return {**self.rate.group(ratio), **self.group(part)}

    def plain(self, ratio: float, **options: Any) -> Any:
        """The plain Keras optimizer that a group of this row at this ratio must equal."""
        arguments = {**self.arguments, **self.keras_arguments, **options}
        return self.keras_class(learning_rate=self.rate.alone(ratio), **arguments)

    def alone(self, model: Any, part: str, ratio: float, fused: bool = True) -> Any:
        """A stand-alone optimizer of one part: Keras', or ours where Keras has none."""
        if self.keras_class is not None:
            return self.plain(ratio)
        group = kgo.Group(part, part, **self.group(part))
        rate = self.rate.alone(ratio)
        return self.grouped(
            [group], model=model, learning_rate=rate, unclaimed="freeze", fused=fused
        )

    def gradients(self, step: int) -> dict[str, np.ndarray]:
        """What `apply` is given at a step."""
        return {path: g * np.float32(self.loss_scale) for path, g in gradients(step).items()}

    def expected_weights(
        self, steps: Sequence[Mapping[str, np.ndarray | None]], **options: Any
    ) -> dict[str, np.ndarray]:
        """What the reference makes of the gradients of these steps.

        Args:
            steps: Gradients by path, as `apply` is given them.
            **options: `frozen` parts, `ratios`, `constraints` by path.
        """
        ratios, frozen = options.pop("ratios", RATIOS), options.pop("frozen", ())
        groups = [
            ReferenceGroup(
                **{
                    "variables": [path for path in PATHS if path.startswith(part)],
                    "rule": self.reference,
                    "learning_rate_ratio": ratio,
                    "learning_rate": self.rate.at,
                    "frozen": part in frozen,
                    **self.expected(part),
                }
            )
            for part, ratio in ratios.items()
        ]
        rules = make_rules(groups)
        weights: dict[str, np.ndarray] = initial_weights()
        for step, given in enumerate(steps):
            mean = {p: None if g is None else g / self.loss_scale for p, g in given.items()}
            weights = grouped_step(
                weights, mean, groups, rules, step, 0.0, self.expected_limit, **options
            )
        return weights

    @property
    def rule_name(self) -> str:
        """The name under which the row's rule is known."""
        registered = keras.saving.get_registered_name(self.keras_class)
        ours = registered.startswith("groupopt_tests>")
        return registered if ours else self.keras_class.__name__


K = keras.optimizers

# A rule alone. Two groups of one rule, at two ratios.
RULES = [
    Case(
        name + ending,
        row.rule(name, **arguments),
        functools.partial(row.reference, **arguments),
        row.cls,
        arguments,
        row.switched_off,
        row.decays,
        named=row.named,
        fusible=bool(row.fused),
        low_precision_faults={
            (backend, dtype): why
            for (of, backend, dtype), why in row.low_precision_faults.items()
            if of == ending
        },
    )
    for name, row in table().items()
    if not row.only_matrices
    for ending, arguments in row.cases.items()
]
RULES.append(Case("third_party", PeakMomentum, PeakMomentumReference, PeakMomentum, fusible=False))

_ANCHORS = {path: 0.5 - weight for path, weight in initial_weights().items()}
_KERNEL = {"backbone": "backbone/kernel", "head": "head/kernel"}
_DECAYS = {"backbone": DECAY, "head": DECAY / 2}


# What can be said of the whole or of a group. Adam, unless the row says otherwise.
DECAYS = [
    Case(
        "decay",
        whole={"weight_decay": DECAY, "exclude_from_decay": ()},
        keras_arguments={"weight_decay": DECAY},
        expected=lambda part: {"weight_decay": DECAY},
    ),
    Case(
        "decay_without_biases",
        keras_class=None,
        whole={"weight_decay": DECAY},
        expected=lambda part: {"weight_decay": DECAY, "decayed": [_KERNEL[part]]},
    ),
    Case(
        "decay_of_each_group",
        keras_class=None,
        whole={"weight_decay": DECAY},
        group=lambda part: {} if part == "backbone" else {"weight_decay": 0.0},
        expected=lambda part: {
            "weight_decay": DECAY if part == "backbone" else 0.0,
            "decayed": [_KERNEL[part]],
        },
    ),
    Case(
        "decay_on_a_schedule",
        keras_class=None,
        whole={"weight_decay": stairs(DECAY)},
        expected=lambda part: {"weight_decay": stairs_at(DECAY), "decayed": [_KERNEL[part]]},
    ),
    Case(
        "decay_toward_initial",
        keras_class=None,
        whole={"weight_decay": DECAY, "anchor": "initial", "exclude_from_decay": ()},
        expected=lambda part: {"weight_decay": DECAY, "anchor": initial_weights()},
    ),
    Case(
        "decay_toward_given",
        keras_class=None,
        group=lambda part: {"weight_decay": DECAY, "anchor": [_ANCHORS[_KERNEL[part]]]},
        expected=lambda part: {
            "weight_decay": DECAY,
            "anchor": _ANCHORS,
            "decayed": [_KERNEL[part]],
        },
        config_is_whole=False,
    ),
    Case(
        "decay_toward_given_for_all",
        keras_class=None,
        whole={"weight_decay": DECAY, "anchor": _ANCHORS, "exclude_from_decay": ()},
        expected=lambda part: {"weight_decay": DECAY, "anchor": _ANCHORS},
        config_is_whole=False,
    ),
]
CLIPPINGS = [
    Case(
        "clipnorm",
        whole={"clipnorm": 1.0},
        keras_arguments={"clipnorm": 1.0},
        expected=lambda part: {"clipnorm": 1.0},
        exact=False,
    ),
    Case(
        "clipvalue",
        whole={"clipvalue": 0.5},
        keras_arguments={"clipvalue": 0.5},
        expected=lambda part: {"clipvalue": 0.5},
    ),
    Case(
        "global_clipnorm_of_a_group",
        group=lambda part: {"global_clipnorm": 1.0},
        keras_arguments={"global_clipnorm": 1.0},
        expected=lambda part: {"global_clipnorm": 1.0},
        exact=False,
    ),
    Case(
        "global_clipnorm",
        whole={"global_clipnorm": 1.0},
        keras_arguments={"global_clipnorm": 1.0},
        expected_limit=1.0,
        separable=False,
        exact=False,
    ),
    Case(
        "clipnorm_then_global_clipnorm",
        keras_class=None,
        group=lambda part: {"clipnorm": 1.0},
        whole={"global_clipnorm": 1.5},
        expected=lambda part: {"clipnorm": 1.0},
        expected_limit=1.5,
        separable=False,
    ),
    Case(
        "loss_scale",
        whole={"loss_scale_factor": 8.0, "global_clipnorm": 1.0},
        keras_arguments={"loss_scale_factor": 8.0, "global_clipnorm": 1.0},
        loss_scale=8.0,
        expected_limit=1.0,
        separable=False,
        exact=False,
    ),
]
RATES = [
    Case(
        "base_on_a_schedule",
        rate=Rate(base=stairs(RATE), alone=lambda ratio: stairs(RATE * ratio), at=stairs_at(RATE)),
    ),
    Case(
        "base_from_a_function",
        rate=Rate(
            base=quarter_rate, alone=lambda ratio: RATE / 4 * ratio, at=lambda step: RATE / 4
        ),
    ),
    Case(
        "ratio_on_a_schedule",
        rate=Rate(
            group=lambda ratio: {"learning_rate_ratio": stairs(ratio)},
            alone=lambda ratio: stairs(RATE * ratio),
            at=stairs_at(RATE),
        ),
    ),
    Case(
        "schedule_of_a_group",
        rate=Rate(
            base=1.0,
            group=lambda ratio: {"learning_rate": stairs(RATE), "learning_rate_ratio": ratio},
            alone=lambda ratio: stairs(RATE * ratio),
            at=stairs_at(RATE),
        ),
    ),
    Case(
        "rate_of_a_group",
        rate=Rate(base=2 * RATE, group=lambda ratio: {"learning_rate": RATE * ratio}),
    ),
]
_MIXED = {"backbone": ("lion", references.Lion), "head": ("adamax", references.Adamax)}
RULES_OF_GROUPS = [
    Case(
        "instances",
        keras_class=K.AdamW,
        keras_arguments={"weight_decay": DECAY, "clipvalue": 0.5},
        group=lambda part: {"exclude_from_decay": ()},
        expected=lambda part: {"weight_decay": DECAY, "clipvalue": 0.5},
        as_instance=True,
    ),
    Case(
        "a_rule_of_each_group",
        rule="sgd",
        keras_class=None,
        group=lambda part: {"rule": _MIXED[part][0]},
        expected=lambda part: {"rule": _MIXED[part][1]},
    ),
    Case(
        "everything_at_once",
        rule="sgd",
        keras_class=None,
        rate=Rate(
            base=stairs(RATE),
            group=lambda ratio: {"learning_rate_ratio": stairs(ratio)},
            alone=lambda ratio: None,
            at=lambda step: stairs_at(RATE)(step) * stairs_at(1.0)(step),
        ),
        group=lambda part: {
            "rule": _MIXED[part][0],
            "clipvalue": 0.5,
            "weight_decay": stairs(_DECAYS[part]),
            "anchor": "initial",
        },
        whole={"global_clipnorm": 1.0},
        expected=lambda part: {
            "rule": _MIXED[part][1],
            "clipvalue": 0.5,
            "weight_decay": stairs_at(_DECAYS[part]),
            "anchor": initial_weights(),
            "decayed": [_KERNEL[part]],
        },
        expected_limit=1.0,
        separable=False,
    ),
]

OPTIONS = [*DECAYS, *CLIPPINGS, *RATES, *RULES_OF_GROUPS]
CASES = [*RULES, *OPTIONS]
