"""Rules against the packages they come from: a hundred steps, to float32 rounding.

Every rule runs in a group of a `GroupedOptimizer`, on the backend of the test run. The original
runs in float64, on the same gradients, whatever that backend is. A row says with which arguments
the two are one rule. Where an original cannot be met, the row that is missing is named here:

* Adam, AdamW, Adamax, Adagrad and RMSprop of Keras have ε elsewhere than those of torch: under the
  root, beside the uncorrected moment, or outside of the maximum. They meet at ε = 0, and Adagrad
  and RMSprop meet Optax, which has ε under the root too, at any ε.
* Adan of Optax takes 1 - β₂ for the look-ahead, where paper and authors take β₂ (in its spelling).
* LARS of pytorch_optimizer starts its momentum from the first gradient as it is, unscaled, and
  scales no vectors; Optax has the paper's.
* Muon of torch and pytorch_optimizer iterates in bfloat16; Optax does in the dtype of the weights.
  Its look-ahead corrects biases as Nadam does; `optax.trace` before it has that of the authors.
* Adafactor of pytorch_optimizer scales by the size of the weights where it is told not to.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

import keras_groupopt as kgo

STEPS = 100
SHAPES = {"kernel": (4, 3), "bias": (4,)}
MATRICES = {"wide": (3, 5), "tall": (5, 3)}

Arrays = dict[str, np.ndarray]
Original = Callable[[Arrays, list[Arrays]], Arrays]


def start(shapes: dict[str, tuple[int, ...]]) -> Arrays:
    random = np.random.default_rng(0)
    return {name: np.float32(random.normal(size=shape)) for name, shape in shapes.items()}


def history(shapes: dict[str, tuple[int, ...]]) -> list[Arrays]:
    """Gradients with a direction, whose size changes from step to step."""
    random = np.random.default_rng(1)
    pull = {name: random.normal(size=shape) for name, shape in shapes.items()}
    return [
        {
            n: np.float32((pull[n] + random.normal(size=s)) * (1 + step % 3))
            for n, s in shapes.items()
        }
        for step in range(STEPS)
    ]


def of_torch(make: Callable[[list[Any], Any], Any]) -> Original:
    """What an optimizer of torch's kind, made of parameters and the module, does."""

    def run(weights: Arrays, gradients: list[Arrays]) -> Arrays:
        torch = pytest.importorskip("torch")
        parameters = {
            name: torch.nn.Parameter(torch.tensor(w, dtype=torch.float64, device="cpu"))
            for name, w in weights.items()
        }
        optimizer = make(list(parameters.values()), torch.optim)
        for step in gradients:
            for name, parameter in parameters.items():
                parameter.grad = torch.tensor(step[name], dtype=torch.float64, device="cpu")
            optimizer.step()
        return {name: parameter.detach().numpy() for name, parameter in parameters.items()}

    return run


def of_package(make: Callable[[list[Any], Any], Any]) -> Original:
    """What an optimizer of pytorch_optimizer does."""

    def run(weights: Arrays, gradients: list[Arrays]) -> Arrays:
        package = pytest.importorskip("pytorch_optimizer")
        return of_torch(lambda parameters, _: make(parameters, package))(weights, gradients)

    return run


def ahead(optimizer: Any, k: int, alpha: float) -> Any:
    """Lookahead of pytorch_optimizer around an optimizer of torch."""
    return pytest.importorskip("pytorch_optimizer").Lookahead(optimizer, k=k, alpha=alpha)


def of_optax(make: Callable[[Any], Any]) -> Original:
    """What a transformation of Optax does."""

    def run(weights: Arrays, gradients: list[Arrays]) -> Arrays:
        optax = pytest.importorskip("optax")
        jax = pytest.importorskip("jax")
        with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
            transformation = make(optax)

            @jax.jit
            def all_steps(values: Any, stacked: Any) -> Any:
                def one(carry: Any, gradient: Any) -> Any:
                    values, state = carry
                    move, state = transformation.update(gradient, state, values)
                    return (optax.apply_updates(values, move), state), None

                return jax.lax.scan(one, (values, transformation.init(values)), stacked)[0][0]

            wide = {name: jax.numpy.asarray(w, "float64") for name, w in weights.items()}
            stacked = {
                name: jax.numpy.asarray(np.stack([g[name] for g in gradients]), "float64")
                for name in weights
            }
            return {name: np.asarray(w) for name, w in all_steps(wide, stacked).items()}

    return run


@dataclasses.dataclass(frozen=True)
class Row:
    """A rule of ours or of Keras, and the original that it must equal.

    Args:
        rule: The rule of the group.
        original: Runs the original.
        rate: The rate of both.
        weight_decay: The decay of the group.
        shapes: The shapes of the variables.
        alone: Makes an optimizer that stands alone, in place of one with groups.
    """

    rule: Any
    original: Original
    rate: float = 0.02
    weight_decay: float | None = None
    shapes: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=lambda: SHAPES)
    alone: Callable[[], Any] | None = None

    def optimizer(self) -> Any:
        if self.alone is not None:
            return self.alone()
        return kgo.GroupedOptimizer(
            rule=self.rule,
            learning_rate=self.rate,
            weight_decay=self.weight_decay,
            exclude_from_decay=(),
        )


R = Row.rate
rule = kgo.rule


ROWS: dict[str, Row] = {
    "sgd": Row("sgd", of_torch(lambda p, o: o.SGD(p, R))),
    "sgd with momentum": Row(rule("sgd", momentum=0.9), of_torch(lambda p, o: o.SGD(p, R, 0.9))),
    "sgd with nesterov": Row(
        rule("sgd", momentum=0.8, nesterov=True),
        of_optax(lambda o: o.sgd(R, momentum=0.8, nesterov=True)),
    ),
    "adam": Row(rule("adam", epsilon=0.0), of_torch(lambda p, o: o.Adam(p, R, eps=0.0))),
    "adam, own betas": Row(
        rule("adam", epsilon=0.0, beta_1=0.7, beta_2=0.95),
        of_optax(lambda o: o.adam(R, b1=0.7, b2=0.95, eps=0.0)),
    ),
    "adam, amsgrad": Row(
        rule("adam", epsilon=0.0, amsgrad=True, beta_2=0.9),
        of_torch(lambda p, o: o.Adam(p, R, (0.9, 0.9), 0.0, amsgrad=True)),
    ),
    "adamw": Row(
        rule("adamw", epsilon=0.0, beta_2=0.95),
        of_torch(lambda p, o: o.AdamW(p, R, (0.9, 0.95), 0.0, weight_decay=0.3)),
        weight_decay=0.3,
    ),
    "adamax": Row(
        rule("adamax", epsilon=0.0, beta_2=0.9),
        of_torch(lambda p, o: o.Adamax(p, R, (0.9, 0.9), eps=0.0)),
    ),
    "nadam": Row(
        rule("nadam", epsilon=1e-3, beta_2=0.95),
        of_torch(lambda p, o: o.NAdam(p, R, (0.9, 0.95), 1e-3, momentum_decay=1.0)),
    ),
    "adagrad": Row(
        rule("adagrad", initial_accumulator_value=0.5, epsilon=0.0),
        of_torch(lambda p, o: o.Adagrad(p, R, initial_accumulator_value=0.5, eps=0.0)),
    ),
    "adagrad, own epsilon": Row(
        rule("adagrad", epsilon=1e-2), of_optax(lambda o: o.adagrad(R, eps=1e-2))
    ),
    "adadelta": Row(
        rule("adadelta", rho=0.9, epsilon=1e-2),
        of_torch(lambda p, o: o.Adadelta(p, R, rho=0.9, eps=1e-2)),
    ),
    "rmsprop": Row(
        rule("rmsprop", rho=0.8, epsilon=0.0), of_torch(lambda p, o: o.RMSprop(p, R, 0.8, 0.0))
    ),
    "rmsprop, centered with momentum": Row(
        rule("rmsprop", epsilon=1e-2, momentum=0.5, centered=True),
        of_optax(lambda o: o.rmsprop(R, 0.9, 1e-2, centered=True, momentum=0.5)),
    ),
    "lion": Row(rule("lion", beta_1=0.8), of_optax(lambda o: o.lion(R, b1=0.8, weight_decay=0.0))),
    "lamb": Row(
        rule("lamb", epsilon=1e-3, beta_2=0.95), of_optax(lambda o: o.lamb(R, b2=0.95, eps=1e-3))
    ),
    "adafactor, relative and scaled": Row(
        rule("adafactor", relative_limit=0.25, beta_2_decay=-0.6, clip_threshold=1.5),
        of_torch(lambda p, o: o.Adafactor(p, 0.25, beta2_decay=-0.6, eps=(1e-30, 1e-3), d=1.5)),
        rate=0.25,
    ),
    "adafactor, scaled": Row(
        rule("adafactor", relative_step=False, clip_threshold=0.5),
        of_optax(lambda o: o.adafactor(R, min_dim_size_to_factor=1, clipping_threshold=0.5)),
    ),
    "adafactor, relative": Row(
        rule("adafactor", scale_parameter=False, relative_limit=0.25),
        of_optax(
            lambda o: o.adafactor(
                # Its schedules are called with the steps made.
                lambda made: R * (1.0 / (0.25 * (made + 1.0) ** 0.5)).clip(max=1.0),
                min_dim_size_to_factor=1,
                multiply_by_parameter_scale=False,
            )
        ),
    ),
    "adafactor, plain": Row(
        rule("adafactor", scale_parameter=False, relative_step=False),
        of_optax(
            lambda o: o.adafactor(R, min_dim_size_to_factor=1, multiply_by_parameter_scale=False)
        ),
    ),
    "adan": Row(
        None,
        of_package(lambda p, o: o.Adan(p, R, weight_decay=0.3)),
        alone=lambda: kgo.Adan(R, weight_decay=0.3),
    ),
    "adan, own betas": Row(
        rule("adan", beta_1=0.9, beta_2=0.7, beta_3=0.95, epsilon=1e-2),
        of_package(
            lambda p, o: o.Adan(
                p, R, (0.9, 0.7, 0.95), weight_decay=0.3, weight_decouple=True, eps=1e-2
            )
        ),
        weight_decay=0.3,
    ),
    "lars": Row("lars", of_optax(lambda o: o.lars(2.0)), rate=2.0),
    "lars with nesterov": Row(
        rule("lars", momentum=0.8, trust_coefficient=0.1, epsilon=0.5, nesterov=True),
        of_optax(lambda o: o.lars(R, 0.0, True, 0.1, 0.5, True, 0.8, True)),
    ),
    "adabelief": Row("adabelief", of_optax(lambda o: o.adabelief(R))),
    "adabelief, own epsilon": Row(
        rule("adabelief", beta_1=0.8, beta_2=0.95, epsilon=1e-3),
        of_optax(lambda o: o.adabelief(R, 0.8, 0.95, 1e-3, 1e-3)),
    ),
    "adabelief, rectified": Row(
        rule("adabelief", rectify=True, beta_2=0.98),
        of_package(lambda p, o: o.AdaBelief(p, R, (0.9, 0.98), rectify=True)),
    ),
    "adabelief, amsgrad": Row(
        rule("adabelief", amsgrad=True, beta_2=0.9),
        of_package(lambda p, o: o.AdaBelief(p, R, (0.9, 0.9), 0.2, ams_bound=True)),
        weight_decay=0.2,
    ),
    "nadamw": Row(
        "nadamw",
        of_torch(lambda p, o: o.NAdam(p, R, weight_decay=0.3, decoupled_weight_decay=True)),
        weight_decay=0.3,
    ),
    "nadamw, own pace": Row(
        rule("nadamw", beta_1=0.8, beta_2=0.95, epsilon=1e-2, momentum_decay=0.1),
        of_torch(lambda p, o: o.NAdam(p, R, (0.8, 0.95), 1e-2, momentum_decay=0.1)),
    ),
    "nadamw, no warm-up": Row(
        rule("nadamw", momentum_decay=0.0), of_torch(lambda p, o: o.NAdam(p, R, momentum_decay=0.0))
    ),
    "lookahead": Row(
        rule("lookahead", rule=rule("sgd", momentum=0.9), slow_step_size=0.8),
        of_torch(lambda p, o: ahead(o.SGD(p, R, 0.9), k=6, alpha=0.8)),
    ),
    "lookahead of radam": Row(
        rule("lookahead", sync_period=5),
        of_torch(lambda p, o: ahead(o.RAdam(p, R), k=5, alpha=0.5)),
    ),
    "muon": Row(
        rule("muon", momentum=0.9),
        of_optax(
            lambda o: o.chain(
                o.trace(0.9, nesterov=True),
                o.contrib.muon(R, beta=0.0, nesterov=False, eps=1e-7, consistent_rms=0.2),
            )
        ),
        shapes=MATRICES,
    ),
    "muon without nesterov": Row(
        rule("muon", momentum=0.8, nesterov=False, rms_rate=None, ns_steps=3),
        of_optax(lambda o: o.contrib.muon(R, beta=0.8, nesterov=False, eps=1e-7, ns_steps=3)),
        shapes=MATRICES,
    ),
    "schedule-free": Row(
        "schedulefreeadamw", of_package(lambda p, o: o.ScheduleFreeAdamW(p, R, (0.9, 0.999)))
    ),
    "schedule-free with warm-up": Row(
        rule("schedulefreeadamw", beta_1=0.8, beta_2=0.95, epsilon=1e-3, warmup_steps=20, r=0.5),
        of_package(
            lambda p, o: o.ScheduleFreeAdamW(p, R, (0.8, 0.95), r=0.5, warmup_steps=20, eps=1e-3)
        ),
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_hundred_steps_are_those_of_the_original(name: str) -> None:
    row = ROWS[name]
    weights, gradients = start(row.shapes), history(row.shapes)
    expected = row.original(weights, gradients)
    variables = {n: keras.Variable(w, name=n) for n, w in weights.items()}
    optimizer = row.optimizer()
    optimizer.build(list(variables.values()))
    for step in gradients:
        optimizer.apply([keras.ops.convert_to_tensor(step[n]) for n in variables])
    for n, variable in variables.items():
        move = np.max(np.abs(expected[n] - weights[n]))
        assert move > 0.01, f"{n} hardly moved: nothing would be compared"
        actual = np.array(keras.ops.convert_to_numpy(variable), "float64")
        error = np.max(np.abs(actual - expected[n]))
        # Beside it, what a float32 weight cannot hold: each step rounds it.
        rounding = 1e-6 * np.max(np.abs(weights[n]))
        assert error <= 1e-5 * move + rounding, f"{n}: off by {error / move:.1e} of the way"
