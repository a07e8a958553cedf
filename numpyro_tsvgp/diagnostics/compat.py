"""The one place that knows which ArviZ is installed: 0.x with InferenceData, 1.x with DataTree.

ArviZ is imported inside the functions, so that a session that never asks for it does not pay for
it.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from importlib.metadata import version
from typing import Any

import numpy as np
import xarray as xr

__all__ = ["build", "elpd", "pareto_k", "psis_loo"]


def _major() -> int:
    return int(version("arviz").split(".")[0])


def _arviz(module: str = "arviz") -> Any:
    return import_module(module)  # not a statement: each version lacks some names of the other


def build(groups: Mapping[str, xr.Dataset]) -> Any:
    """An ArviZ object of data sets: ``InferenceData`` in ArviZ 0.x, ``xarray.DataTree`` in 1.x.

    Args:
      groups: data sets by the name of their group.

    Returns:
      The object that the functions of the installed ArviZ take.
    """
    from numpyro_tsvgp import __version__

    attrs = {
        "created_at": datetime.datetime.now(datetime.UTC).isoformat(),
        "inference_library": "numpyro_tsvgp",
        "inference_library_version": __version__,
    }
    if _major() >= 1:
        attrs |= {
            "creation_library": "ArviZ",
            "creation_library_version": version("arviz-base"),
            "creation_library_language": "Python",
        }
    else:
        attrs["arviz_version"] = version("arviz")
    groups = {name: data.assign_attrs(attrs) for name, data in groups.items()}
    if _major() >= 1:
        return xr.DataTree.from_dict(groups)
    return _arviz().InferenceData(attrs=attrs, **groups)


def numbered(name: str, dims: Sequence[str | None]) -> list[str]:
    """Names of axes, with numbers for those without one as ArviZ counts them.

    Args:
      name: the variable.
      dims: names of its axes, or None.

    Returns:
      Names of all axes.
    """
    out, unnamed = [], 0
    for axis, dim in enumerate(dims):
        number = unnamed if _major() >= 1 else axis  # of those without a name, or of all
        out.append(f"{name}_dim_{number}" if dim is None else dim)
        unnamed += dim is None
    return out


def elpd(
    pointwise: xr.DataArray,
    p: float,
    *,
    warning: bool,
    leverage: xr.DataArray,
    threshold: float,
    extra: Mapping[str, xr.DataArray],
) -> Any:
    """An ArviZ ELPD object of leave-one-out densities that needed no importance sampling.

    Args:
      pointwise: log predictive density of each point with that point left out.
      p: effective number of parameters.
      warning: whether some points are unreliable.
      leverage: how much of its own marginal each point accounts for. Nothing was weighted, so there
        is no Pareto k; the leverage takes its place, in ``plot_khat`` for one.
      threshold: from where on it is large.
      extra: further entries, read with ``result["name"]``.

    Returns:
      What ``az.loo(..., pointwise=True)`` returns, with a text of its own.
    """
    n = pointwise.size
    total, se = float(pointwise.sum()), float(np.sqrt(n * pointwise.var()))
    if _major() >= 1:
        result = _of_cavities(_arviz().ELPDDataLOO)(
            elpd=total,
            se=se,
            p=p,
            n_samples=1,
            n_data_points=n,
            scale="log",
            warning=warning,
            good_k=threshold,
            elpd_i=pointwise.rename("elpd_i"),
            pareto_k=leverage.rename("pareto_k"),
        )
    else:
        fields: dict[str, Any] = {
            "elpd_loo": total,
            "se": se,
            "p_loo": p,
            "n_samples": 1,
            "n_data_points": n,
            "warning": warning,
            "loo_i": pointwise.rename("loo_i"),
            "scale": "log",
            "pareto_k": leverage.rename("pareto_k"),
            "good_k": threshold,
        }
        ELPDData = _arviz("arviz.stats.stats_utils").ELPDData
        result = _of_cavities(ELPDData)(data=list(fields.values()), index=list(fields))
    return _with(result, extra)


@cache
def _of_cavities(base: Any) -> Any:
    """A class of ArviZ whose text says where the numbers are from."""

    def text(self: Any) -> str:
        lines = base.__str__(self).split("\n")
        table = [line for line in lines if line.startswith(("    ", "elpd", "p_loo"))]
        high, n = int((self["pareto_k"] > self["good_k"]).sum()), int(self["n_data_points"])
        return "\n".join(
            [
                f"Computed from the sites of {n} observations, leaving out each in turn; nothing "
                "was sampled.",
                "",
                *table[:3],
                "",
                f"{high} of {n} have a leverage (pareto_k) above {self['good_k']:.2g}"
                + (": what is left without them is extrapolation." if high else "."),
            ]
        )

    return type("ELPDOfCavities", (base,), {"__str__": text, "__repr__": text})


def psis_loo(
    log_predictive: xr.DataArray,
    log_density: xr.DataArray,
    *,
    warning: bool,
    extra: Mapping[str, xr.DataArray],
) -> Any:
    """Pareto-smoothed importance sampling over draws of leave-one-out densities.

    Args:
      log_predictive: log predictive density of each point with that point left out, given each
        draw, dims ``(chain, draw, points)``.
      log_density: the same with no point left out.
      warning: whether some points are unreliable for another reason than their Pareto k.
      extra: further entries, read with ``result["name"]``.

    Returns:
      What ``az.loo(..., pointwise=True)`` returns.
    """
    data = log_predictive.rename("y").to_dataset()
    placeholder = log_predictive[..., 0].drop_vars([log_predictive.dims[-1]])
    tree = build({"posterior": placeholder.rename("any").to_dataset(), "log_likelihood": data})
    result = _arviz().loo(tree, pointwise=True, reff=1.0)
    result["warning"] = bool(result["warning"]) or warning
    within = np.logaddexp.reduce(log_density.values, (0, 1)) - np.log(log_density[..., 0].size)
    name = "" if _major() >= 1 else "_loo"
    result[f"p{name}"] = float(within.sum() - result[f"elpd{name}"])
    return _with(result, extra)


def _with(result: Any, extra: Mapping[str, xr.DataArray]) -> Any:
    for name, value in extra.items():
        result[name] = value.rename(name)
    return result


def pareto_k(log_ratios: np.ndarray) -> float:
    """The Pareto k of importance ratios.

    Args:
      log_ratios: logarithms of the ratios of target to proposal, shape ``(draws,)``.

    Returns:
      The shape of the fitted tail.
    """
    ratios = np.array(log_ratios, float)
    if _major() >= 1:
        array_stats = _arviz("arviz_stats.base").array_stats
        return float(array_stats.psislw(-ratios)[1])  # it takes the negative ratios
    return float(_arviz().psislw(ratios)[1])
