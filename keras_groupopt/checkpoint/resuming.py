"""The terms on which Keras' own loading functions restore an optimizer's state."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Mapping

from keras_groupopt.checkpoint.matching import Report
from keras_groupopt.checkpoint.renames import check_renames
from keras_groupopt.checkpoint.saved import Terms

# A context variable: threads and tasks that load at the same time keep their own terms.
_present: contextvars.ContextVar[Terms | None] = contextvars.ContextVar("terms", default=None)


def present_terms() -> Terms:
    """Returns the terms of the innermost `resuming`, or the strictest."""
    return _present.get() or Terms()


def terms(strict: bool = True, renames: Mapping[str, str] | None = None) -> Terms:
    """Returns terms, after checking them."""
    return Terms(strict=bool(strict), renames=check_renames(renames))


@contextlib.contextmanager
def resuming(strict: bool = True, renames: Mapping[str, str] | None = None) -> Iterator[Report]:
    """Sets, within a `with` block, how optimizer state is restored by any load of Keras.

    The block goes around `model.load_weights`, `keras.saving.load_model`, or `fit` with
    `keras.callbacks.BackupAndRestore`. State is matched by group, layer path and slot. It may
    reach an optimizer that is not built: the terms then hold until its build, which fills the
    report. Of several loads in one block, the report tells of the last.

    Args:
        strict: Whether another layout is refused. With `False`, state that matches is loaded and
            the rest stays as this optimizer has it. A group for which nothing is loaded counts its
            steps from there on. Default: `True`.
        renames: Names that differ in the file: from a layer path or its beginning, as saved, to
            its present name; for groups `"group:<saved>": "group:<present>"`. The longest match
            counts. A name that does not exist is an error. Default: none.

    Yields:
        The `Report`: what was kept, what starts fresh, and what was dropped.

    Raises:
        TypeError: If `renames` is no dict of strings.
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
    """Loads within the block are on the terms `present`."""
    token = _present.set(present)
    try:
        yield
    finally:
        _present.reset(token)
