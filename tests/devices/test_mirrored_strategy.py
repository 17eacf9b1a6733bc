"""TensorFlow's strategies of several replicas; the cases are in `mirrored_cases.py`."""

from __future__ import annotations

import pathlib

import pytest

CASES = pathlib.Path(__file__).with_name("mirrored_cases.py")
RUN = "import pytest, sys; sys.exit(pytest.main(['-q', '-p', 'no:cacheprovider', sys.argv[1]]))"


@pytest.mark.backends("tensorflow", reason="only TensorFlow has strategies of replicas")
def test_two_replicas_do_what_one_device_does(new_process):
    assert " passed" in new_process(RUN, str(CASES))
