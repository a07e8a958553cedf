"""Predictors in files: arrays, and a description of the kernels that they belong to."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from numpyro_tsvgp import kernels
from numpyro_tsvgp.gaussian.features import Prior
from numpyro_tsvgp.gaussian.inducing_values import InducingReady
from numpyro_tsvgp.gaussian.markov_ready import MarkovReady
from numpyro_tsvgp.gaussian.whitened import Posterior
from numpyro_tsvgp.infer.predictions.predictor import Predictor, SitePredictor
from numpyro_tsvgp.infer.predictions.site_prior import SitePrior
from numpyro_tsvgp.kernels.tree import Slice
from numpyro_tsvgp.model.structure import Structure

__all__ = ["describe_predictor", "rebuild_predictor"]

# Ready posteriors that a file can name, with anything in the place of arrays.
_READY: dict[str, Any] = {
    "InducingReady": InducingReady(0, Prior(0, 0), Posterior(0, 0, 0), 0, 0),  # type: ignore[arg-type]
    "MarkovReady": MarkovReady(0, 0, 0, 0, 0),  # type: ignore[arg-type]
}


def describe_predictor(predictor: Predictor) -> tuple[dict[str, Any], dict[str, Any]]:
    """A predictor as nested dicts of arrays and a description as JSON has it.

    Args:
      predictor: the predictor.

    Returns:
      Arrays and description.

    Raises:
      TypeError: if a kernel, or a posterior, is none of this library.
    """
    arrays: dict[str, Any] = {
        "parameters": dict(predictor.parameters),
        "hyper": dict(predictor.hyper),
        "sites": {},
    }
    sites = {}
    for name, site in predictor.sites.items():
        kind = type(site.ready).__name__
        if kind not in _READY:
            raise TypeError(
                f"The posterior of GP site '{name}' is a {kind}, which no file can describe. Save "
                "the fit, and make the predictor of it after loading."
            )
        kernel = _describe_kernel(site.prior.kernel, name)
        sites[name] = {
            "ready": kind,
            "kernel": kernel,
            "columns": site.prior.columns,
            "batch_shape": list(site.prior.batch_shape),
            "mean": site.prior.mean is not None,
        }
        arrays["sites"][name] = {
            "kernel": _numbered(site.prior.kernel),
            "ready": _numbered(site.ready),
            "mean": {} if site.prior.mean is None else {"0": site.prior.mean},
        }
    return arrays, {"sites": sites, "stacked": predictor.stacked}


def rebuild_predictor(
    arrays: Mapping[str, Any],
    description: Mapping[str, Any],
    structure: Structure,
    quadrature: Any,
    model: Callable[..., Any] | None,
) -> Predictor:
    """A predictor from what :func:`describe_predictor` gave.

    Args:
      arrays: nested dicts of arrays.
      description: what they belong to.
      structure: the structure of the model.
      quadrature: the quadrature rule.
      model: the NumPyro model, or None for predictions of single GP sites.

    Returns:
      The predictor.
    """
    stacked = description["stacked"]
    sites = {}
    for name, about in description["sites"].items():
        found = arrays["sites"][name]
        leaves = iter(_in_order(found["kernel"]))
        prior = SitePrior(
            _rebuild_kernel(about["kernel"], leaves),
            found["mean"]["0"] if about["mean"] else None,
            name,
            about["columns"],
            tuple(about["batch_shape"]),
        )
        shape = jax.tree.structure(_READY[about["ready"]])
        ready = jax.tree.unflatten(shape, _in_order(found["ready"]))
        sites[name] = SitePredictor(prior, ready, stacked)
    return Predictor(
        sites,
        arrays.get("parameters", {}),
        arrays.get("hyper", {}),
        model,
        structure,
        quadrature,
        stacked,
    )


def _numbered(tree: Any) -> dict[str, Any]:
    return {str(i): leaf for i, leaf in enumerate(jax.tree.leaves(tree))}


def _in_order(numbered: Mapping[str, Any]) -> list[Any]:
    return [numbered[str(i)] for i in range(len(numbered))]


def _is_ours(kernel: Any) -> bool:
    known = getattr(kernels, type(kernel).__name__, None)
    foreign = isinstance(kernel, kernels.External | kernels.Function)
    return known is type(kernel) and not foreign


def _describe_kernel(kernel: Any, site: str) -> dict[str, Any]:
    if not _is_ours(kernel):
        raise TypeError(
            f"The kernel of GP site '{site}' has a {type(kernel).__name__} in it, which is code "
            "and no file can describe. Save the fit, and make the predictor of it after loading."
        )
    static: dict[str, Any] = {}
    parts: dict[str, Any] = {}
    for field in dataclasses.fields(kernel):
        value = getattr(kernel, field.name)
        if field.metadata.get("static"):
            static[field.name] = _describe_static(value)
        elif isinstance(value, kernels.Kernel):
            parts[field.name] = _describe_kernel(value, site)
        else:
            parts[field.name] = None
    return {"class": type(kernel).__name__, "static": static, "parts": parts}


def _describe_static(value: Any) -> Any:
    """Columns, whole numbers and classes of kernels, as JSON has them."""
    if isinstance(value, Slice):
        return {"slice": dataclasses.astuple(value)}
    return {"kernel": value.__name__} if isinstance(value, type) else value


def _rebuild_static(value: Any) -> Any:
    if isinstance(value, dict):
        return _class(value["kernel"]) if "kernel" in value else Slice(*value["slice"])
    return tuple(value) if isinstance(value, list) else value


def _class(name: Any) -> Any:
    kind = getattr(kernels, str(name), None)
    if not (isinstance(kind, type) and issubclass(kind, kernels.Kernel)):
        raise ValueError(
            f"The file names a kernel {name}, which this version of numpyro_tsvgp does not have."
        )
    return kind


def _rebuild_kernel(description: Mapping[str, Any], leaves: Iterator[Any]) -> Any:
    kind = _class(description["class"])
    # Not by the constructor: with a leading axis of draws its checks of shapes do not apply.
    kernel = object.__new__(kind)
    for name, part in description["parts"].items():
        value = next(leaves) if part is None else _rebuild_kernel(part, leaves)
        object.__setattr__(kernel, name, value)
    for name, value in description["static"].items():
        object.__setattr__(kernel, name, _rebuild_static(value))
    return kernel
