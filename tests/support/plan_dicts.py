"""Plans as `Plan.to_dict()` gives them, built by hand for the tests of the views."""

from __future__ import annotations

from typing import Any

from keras_groupopt.plan.views.table import summary

EXCLUDED = 'rank(max=1) | variable_name("bias", "gamma", "beta")'


def variable(path: str, shape: tuple[int, ...] = (2, 3), **options: Any) -> dict[str, Any]:
    return {
        "path": path,
        "name": path.rsplit("/", 1)[-1],
        "shape": list(shape),
        "dtype": "float32",
        "decayed": len(shape) > 1,
        "anchored": False,
        "state_bytes": None,
    } | options


def group(name: str, *variables: dict[str, Any], **options: Any) -> dict[str, Any]:
    return {
        "name": name,
        "selector": f'path("{name}")',
        "rule": "radam",
        "rule_arguments": {},
        "learning_rate": "0.001",
        "learning_rate_ratio": 1.0,
        "weight_decay": 1e-4,
        "anchor": "zero",
        "exclude_from_decay": EXCLUDED,
        "frozen": False,
        "clipnorm": None,
        "global_clipnorm": None,
        "clipvalue": None,
        "variables": list(variables),
    } | options


def plan(*groups: dict[str, Any], provisional: bool = False, **options: Any) -> dict[str, Any]:
    defaults = {"learning_rate": "0.001", "global_clipnorm": 1.0}
    rest = {"unclaimed": "default", "overlap": "error"}
    return {
        "format": 1,
        "provisional": provisional,
        "options": defaults | rest | options,
        "groups": list(groups),
    }


def small_plan() -> dict[str, Any]:
    return plan(
        group(
            "backbone",
            variable("resnet8/conv/kernel", (3, 3, 3, 16), anchored=True, state_bytes=3456),
            variable("resnet8/conv/bias", (16,), state_bytes=128),
            learning_rate="0.001 × 0.1",
            learning_rate_ratio=0.1,
            anchor="initial",
        ),
        group(
            "head",
            variable("head/kernel", (64, 10), state_bytes=2560),
            variable("head/bias", (10,), state_bytes=40),
            rule="lion",
            rule_arguments={"beta_1": 0.95},
            clipnorm=0.5,
        ),
        group("stem", variable("stem/scale", (1,)), frozen=True),
    )


def printed(plan: dict[str, Any], **options: Any) -> str:
    lines: list[str] = []
    summary(plan, print_fn=lines.append, **options)
    return "\n".join(lines)
