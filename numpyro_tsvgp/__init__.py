"""Sparse variational Gaussian processes in the dual parameterization, for NumPyro models."""

from importlib.metadata import PackageNotFoundError, version

from numpyro_tsvgp import expectations, inducing, kernels
from numpyro_tsvgp.bound import collapse
from numpyro_tsvgp.checkpoint import load, save
from numpyro_tsvgp.distributions import GP
from numpyro_tsvgp.guide import AutoDualGaussian
from numpyro_tsvgp.loop import FitError, TSVGPRunResult, TSVGPState
from numpyro_tsvgp.svi import TSVGP

try:
    __version__ = version("numpyro-tsvgp")
except PackageNotFoundError:  # imported from a source tree that is not installed
    __version__ = "0+unknown"

__all__ = [
    "GP",
    "TSVGP",
    "AutoDualGaussian",
    "FitError",
    "TSVGPRunResult",
    "TSVGPState",
    "collapse",
    "expectations",
    "inducing",
    "kernels",
    "load",
    "save",
]
