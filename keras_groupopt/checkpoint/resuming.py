"""The terms on which Keras' loading functions restore an optimizer's state."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Mapping

from keras_groupopt.checkpoint.matching import Report
from keras_groupopt.checkpoint.renames import check_renames
from keras_groupopt.checkpoint.saved import Terms

# It is a context variable, so that threads and tasks that load at the same time have their own.
_present: contextvars.ContextVar[Terms | None] = contextvars.ContextVar("terms", default=None)


def present_terms() -> Terms:
    """Returns the terms of the innermost `resuming`, or the strictest terms outside of any."""
    return _present.get() or Terms()


def terms(strict: bool = True, renames: Mapping[str, str] | None = None) -> Terms:
    """Returns terms, after checking them.

    Args:
        strict: Whether another layout is refused. Default: `True`.
        renames: As in `resuming`. Default: `None`.
    """
    return Terms(strict=bool(strict), renames=check_renames(renames))


@contextlib.contextmanager
def resuming(strict: bool = True, renames: Mapping[str, str] | None = None) -> Iterator[Report]:
    """Sets, within a `with` block, how optimizer state is restored by any load of Keras.

    The block goes around `model.load_weights`, `keras.saving.load_model`, or `fit` with
    `keras.callbacks.BackupAndRestore`. State is matched by group, layer path and slot. If the
    optimizer is not built, the terms hold until its build, which fills the report. If one block
    holds several loads, the report describes the last.

    Args:
        strict: Whether another layout is refused. If it is `False`, what matches is kept, even if
            a variable moved to another group of the same rule, and the rest stays as this
            optimizer has it. If nothing of a group is kept, its steps are counted anew.
            Default: `True`.
        renames: The present name of each layer path that has another one in the file, by its saved
            name; the beginning of a path renames all paths below it. Groups are written
            `"group:<saved>": "group:<present>"`. The longest match is used. A name that does not
            exist is an error. Default: `None`.

    Yields:
        The `Report`: what was kept, what starts fresh, and what was dropped.

    Raises:
        TypeError: If `renames` is not a dict of strings.
        ValueError: If it maps a group to a layer path.

    Example:
    >>> import os, tempfile, keras, keras_groupopt as kgo
    >>> def compiled(head):
    ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, name=head)])
    ...     model.compile(optimizer=kgo.GroupedOptimizer(model=model, rule="adam"), loss="mse")
    ...     model.optimizer.build(model.trainable_variables)
    ...     return model
    >>> path = os.path.join(tempfile.mkdtemp(), "model.weights.h5")
    >>> compiled("head").save_weights(path)
    >>> with kgo.resuming(renames={"head": "classifier"}) as report:
    ...     compiled("classifier").load_weights(path)
    >>> report.fresh, report.dropped, len(report.renamed)
    ([], [], 4)
    """
    own = terms(strict, renames)
    with on_terms(own):
        yield own.report


@contextlib.contextmanager
def on_terms(present: Terms) -> Iterator[None]:
    """Sets the terms of loads within the block."""
    token = _present.set(present)
    try:
        yield
    finally:
        _present.reset(token)
