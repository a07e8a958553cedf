"""Sparse variational Gaussian processes in the dual parameterization, for NumPyro models."""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from numpyro_tsvgp import inducing, kernels
from numpyro_tsvgp.distributions import GP
from numpyro_tsvgp.gaussian import quadrature
from numpyro_tsvgp.infer.em.qsvgp import QSVGP
from numpyro_tsvgp.infer.em.tsvgp import TSVGP
from numpyro_tsvgp.infer.files.saving import load, save
from numpyro_tsvgp.infer.fit import Fit
from numpyro_tsvgp.infer.guides.delta import AutoUnconstrainedDelta
from numpyro_tsvgp.infer.guides.dual import AutoDualGaussian
from numpyro_tsvgp.infer.guides.moment import AutoMomentGaussian
from numpyro_tsvgp.infer.new_data.online import Online, online
from numpyro_tsvgp.infer.new_data.stream import Stream
from numpyro_tsvgp.infer.state import FitError, TSVGPRunResult, TSVGPState
from numpyro_tsvgp.infer.steps.ep_like import EPLike
from numpyro_tsvgp.infer.steps.objective import Bound
from numpyro_tsvgp.infer.steps.propagation import ExpectationPropagation
from numpyro_tsvgp.infer.steps.rules import NaturalGradient, Riemannian
from numpyro_tsvgp.infer.steps.tighter import TighterBound
from numpyro_tsvgp.reparam import GPReparam, whiten

if TYPE_CHECKING:
    from numpyro_tsvgp.diagnostics.calibration import psis_khat, sbc
    from numpyro_tsvgp.diagnostics.conversion import to_arviz
    from numpyro_tsvgp.diagnostics.leave_one_out import influence, loo
    from numpyro_tsvgp.diagnostics.pit import loo_pit
    from numpyro_tsvgp.infer.collapse import collapse

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
    "AutoUnconstrainedDelta",
    "Bound",
    "EPLike",
    "ExpectationPropagation",
    "Fit",
    "FitError",
    "GPReparam",
    "NaturalGradient",
    "Online",
    "Riemannian",
    "Stream",
    "TSVGPRunResult",
    "TSVGPState",
    "TighterBound",
    "collapse",
    "inducing",
    "influence",
    "kernels",
    "load",
    "loo",
    "loo_pit",
    "online",
    "psis_khat",
    "quadrature",
    "save",
    "sbc",
    "to_arviz",
    "whiten",
]

# Loaded when first asked for: they bring xarray and ArviZ, which fitting does not need.
_LAZY = {
    "collapse": "infer.collapse",
    "influence": "diagnostics.leave_one_out",
    "loo": "diagnostics.leave_one_out",
    "loo_pit": "diagnostics.pit",
    "psis_khat": "diagnostics.calibration",
    "sbc": "diagnostics.calibration",
    "to_arviz": "diagnostics.conversion",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
