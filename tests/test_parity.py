"""Short fits give the numbers that version 0.1 gave."""

import numpy as np
import parity_models
import pytest

import numpyro_tsvgp

FAST = ("gaussian-fixed-inducing",)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name not in FAST))
        for name in parity_models.CASES
    ],
)
def test_numbers_are_those_of_version_0_1(name):
    """Up to rounding: the record agrees to 1e-10 between versions of JAX and of Python."""
    case, expected = parity_models.CASES[name], parity_models.recorded(name)
    actual = parity_models.numbers(numpyro_tsvgp, case)
    assert set(actual) == set(expected)
    hint = " (this fit draws random numbers: are keys used as before?)" if case.draws else ""
    for what, value in expected.items():
        if name == "minibatch" and what == "losses":
            continue  # on purpose others: they no longer flatter the batch they were fitted to
        np.testing.assert_allclose(
            actual[what],
            value,
            rtol=case.rtol,
            atol=case.rtol * np.abs(value).max(),  # means near zero are sums of larger numbers
            err_msg=f"{name}: {what}{hint}",
        )
