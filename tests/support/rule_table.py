"""What a row of the one table of rules says, and how the originals of rules run.

The rows are in `keras_rules.py` and `own_rules.py`, which joins them.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from references import Rule

import keras_groupopt as kgo

Arguments = Mapping[str, Any]
Arrays = dict[str, np.ndarray]
RATE = 0.02

# What another package calls an argument, if not by its name; torch also has all betas in one.
SPELLED = {
    "torch.optim": {"epsilon": "eps"},
    "pytorch_optimizer": {"epsilon": "eps", "amsgrad": "ams_bound"},
    "optax": {"epsilon": "eps", "beta_1": "b1", "beta_2": "b2"},
}
BETAS = {"beta_1": 0.9, "beta_2": 0.999}


@dataclasses.dataclass(frozen=True, eq=False)
class Original:
    """Another implementation of a rule, and with which arguments the two are one.

    Args:
        package: The module that has it: `torch.optim`, or what is like it, or `optax`.
        make: Its name there, or what makes it of the module, and of parameters before if it is
            torch's. One that is named is given the arguments of the rule, the rate and the decay.
        arguments: Arguments of the rule. Default: none.
        theirs: More arguments of one that is named. Default: none.
        rate: The rate of both. Default: 0.02.
        weight_decay: The decay of the group. Default: none.
        by_class: Whether the rule's own class takes the decay, in place of a group. Default: no.
    """

    package: str
    make: str | Callable[..., Any]
    arguments: Arguments = dataclasses.field(default_factory=dict)
    theirs: Arguments = dataclasses.field(default_factory=dict)
    rate: float = RATE
    weight_decay: float | None = None
    by_class: bool = False

    def made(self, *parameters: Any) -> Any:
        module = pytest.importorskip(self.package)
        if not isinstance(self.make, str):
            return self.make(*parameters, module)
        names = SPELLED[self.package]
        given = {names.get(name, name): value for name, value in self.arguments.items()}
        betas = {name: given.pop(name) for name in ("beta_1", "beta_2", "beta_3") if name in given}
        if betas:
            given["betas"] = tuple((BETAS | betas).values())
        if self.weight_decay is not None:
            given["weight_decay"] = self.weight_decay
        make = operator.attrgetter(self.make)(module)
        return make(*parameters, self.rate, **given, **self.theirs)

    def run(self, weights: Arrays, gradients: list[Arrays]) -> Arrays:
        """The weights after steps with these gradients, in float64."""
        if self.package == "optax":
            return self._run_on_jax(weights, gradients)
        torch = pytest.importorskip("torch")
        parameters = {
            name: torch.nn.Parameter(torch.tensor(w, dtype=torch.float64, device="cpu"))
            for name, w in weights.items()
        }
        optimizer = self.made(list(parameters.values()))
        for step in gradients:
            for name, parameter in parameters.items():
                parameter.grad = torch.tensor(step[name], dtype=torch.float64, device="cpu")
            optimizer.step()
        return {name: parameter.detach().numpy() for name, parameter in parameters.items()}

    def _run_on_jax(self, weights: Arrays, gradients: list[Arrays]) -> Arrays:
        optax = pytest.importorskip("optax")
        jax = pytest.importorskip("jax")
        with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
            transformation = self.made()

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


of_torch = functools.partial(Original, "torch.optim")
of_package = functools.partial(Original, "pytorch_optimizer")
of_optax = functools.partial(Original, "optax")


@dataclasses.dataclass(frozen=True, eq=False)
class RuleRow:
    """What the tests need to know of a rule.

    Args:
        cls: The class that a group with the rule must equal.
        reference: Makes the float64 rule of one variable; takes the rule's arguments.
        cases: Arguments of each case that meets all contracts, by the end of the case's name.
            Default: one case without arguments.
        switched_off: More arguments of `cls`: they switch off a decay that it has by default.
            Default: none.
        decays: Names under which `cls` takes a decay. Default: `weight_decay`.
        named: Whether the name of `cls` means it. Default: yes.
        low_precision_faults: Why the rule fails in plain Keras, by the end of the case's name,
            backend and dtype. Default: it does not.
        fused: Arguments with which a fused step is compared with the rule, by the end of the
            case's name: each option that changes its arithmetic. Default: there is no fused step.
        mirrored: Arguments on two replicas. Default: none.
        originals: Other implementations, each with arguments of its own. Default: none.
        only_matrices: Whether the rule takes nothing else, so that its cases meet no contract of
            all shapes. Default: no.
        rate: A rate at which a rule of this package learns a small task. Default: 0.02.
        changed: Arguments of a rule of this package that are not its defaults. Default: none.
    """

    cls: type
    reference: Callable[..., Rule]
    cases: Mapping[str, Arguments] = dataclasses.field(default_factory=lambda: {"": {}})
    switched_off: Arguments = dataclasses.field(default_factory=dict)
    decays: Sequence[str] = ("weight_decay",)
    named: bool = True
    low_precision_faults: Mapping[tuple[str, str, str], str] = dataclasses.field(
        default_factory=dict
    )
    fused: Mapping[str, Arguments] = dataclasses.field(default_factory=dict)
    mirrored: Arguments = dataclasses.field(default_factory=dict)
    originals: Mapping[str, Original] = dataclasses.field(default_factory=dict)
    only_matrices: bool = False
    rate: float = 0.02
    changed: Arguments = dataclasses.field(default_factory=dict)

    def rule(self, name: str, **arguments: Any) -> Any:
        """Returns the rule under its name, or as the class that has no name of its own."""
        return kgo.rule(name if self.named else self.cls, **arguments)
