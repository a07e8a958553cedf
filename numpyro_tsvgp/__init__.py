"""Sparse variational Gaussian processes in the dual parameterization, for NumPyro models."""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from numpyro_tsvgp import expectations, inducing, kernels
from numpyro_tsvgp.checkpoint import load, save
from numpyro_tsvgp.distributions import GP
from numpyro_tsvgp.guide import AutoDualGaussian
from numpyro_tsvgp.hyperposterior import collapse
from numpyro_tsvgp.loop import FitError, TSVGPRunResult, TSVGPState
from numpyro_tsvgp.qsvgp import QSVGP, AutoMomentGaussian
from numpyro_tsvgp.svi import TSVGP

if TYPE_CHECKING:
    from numpyro_tsvgp.calibration import psis_khat, sbc
    from numpyro_tsvgp.conversion import to_arviz
    from numpyro_tsvgp.diagnostics import influence, loo

try:
    __version__ = version("numpyro-tsvgp")
except PackageNotFoundError:  # imported from a source tree that is not installed
    __version__ = "0+unknown"

__all__ = [
    "GP",
    "QSVGP",
    "TSVGP",
    "AutoDualGaussian",
    "AutoMomentGaussian",
    "FitError",
    "TSVGPRunResult",
    "TSVGPState",
    "collapse",
    "expectations",
    "inducing",
    "influence",
    "kernels",
    "load",
    "loo",
    "psis_khat",
    "save",
    "sbc",
    "to_arviz",
]

# Loaded when first asked for: they bring xarray and ArviZ, which fitting does not need.
_LAZY = {
    "influence": "diagnostics",
    "loo": "diagnostics",
    "psis_khat": "calibration",
    "sbc": "calibration",
    "to_arviz": "conversion",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
