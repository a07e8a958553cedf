"""Saving and loading fits."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpyro.infer import autoguide

from numpyro_tsvgp.gaussian.quadrature import GaussHermite, Quadrature, QuasiMonteCarlo
from numpyro_tsvgp.infer.files.checkpoint import read_meta, read_tree, write_tree
from numpyro_tsvgp.infer.files.predictor_saving import describe_predictor, rebuild_predictor
from numpyro_tsvgp.infer.fit import Fit
from numpyro_tsvgp.infer.guides.delta import AutoUnconstrainedDelta
from numpyro_tsvgp.infer.guides.dual import AutoDualGaussian
from numpyro_tsvgp.infer.guides.guide import GPGuide
from numpyro_tsvgp.infer.guides.moment import AutoMomentGaussian
from numpyro_tsvgp.infer.predictions.predictor import Predictor
from numpyro_tsvgp.infer.replay import describe_memory, rebuild_memory
from numpyro_tsvgp.infer.steps.ep_like import EPLike
from numpyro_tsvgp.infer.steps.fisher import FisherScoring
from numpyro_tsvgp.infer.steps.laplace import Laplace
from numpyro_tsvgp.infer.steps.objective import Bound, Objective
from numpyro_tsvgp.infer.steps.propagation import ExpectationPropagation
from numpyro_tsvgp.infer.steps.rules import NaturalGradient, Riemannian, SiteRule
from numpyro_tsvgp.infer.steps.tighter import TighterBound
from numpyro_tsvgp.model.structure import HyperSites, Structure

__all__ = ["load", "save"]

# What a file can name. Anything else is given to `load` by the user.
_GUIDES: dict[str, type[GPGuide]] = {
    "AutoDualGaussian": AutoDualGaussian,
    "AutoMomentGaussian": AutoMomentGaussian,
}
_POINTS: dict[str, type] = {"AutoUnconstrainedDelta": AutoUnconstrainedDelta}
_SETTINGS: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        *(NaturalGradient, Riemannian, Laplace, FisherScoring, ExpectationPropagation),
        *(GaussHermite, QuasiMonteCarlo),
        *(Bound, TighterBound, EPLike),
    )
}


def save(path: str | os.PathLike[str], fit: Any) -> None:
    """Saves a fit or a predictor to one file, or a state or a result to go on from.

    The file has the parameters and all settings of a fit, and the memory of a stream. It has
    neither the model, which is code, nor the training data. A predictor is saved with its kernels
    at the fitted hyperparameters.

    Args:
      path: the file to write; an existing one is replaced in one step.
      fit: a :class:`~numpyro_tsvgp.Fit`, a predictor (``fit.predictor()``), a result of ``run``, a
        state, or any pytree of arrays.

    Examples:
      >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
      >>> import pathlib, tempfile
      >>> from numpyro_tsvgp import GP, TSVGP, AutoDualGaussian, kernels, load, save
      >>> def model(X, y=None):
      ...     f = numpyro.sample("f", GP(kernels.RBF(0.3), X))
      ...     with numpyro.plate("data", X.shape[0]):
      ...         numpyro.sample("y", dist.Normal(f, 0.3), obs=y)
      >>> X = jnp.linspace(0.0, 1.0, 20)
      >>> svi = TSVGP(model, AutoDualGaussian(model, inducing=X[::3]), None)
      >>> result = svi.run(jax.random.key(0), 3, X, jnp.sin(6.0 * X), progress_bar=False)
      >>> path = pathlib.Path(tempfile.mkdtemp()) / "fit.npz"
      >>> save(path, result.fit)
      >>> load(path, model=model).marginals(jnp.array([0.2, 0.8]))["f"].mean.shape
      (2,)
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"The path comes first, save(path, fit); got {type(path).__name__}.")
    if isinstance(fit, Fit):
        arrays: dict[str, Any] = {"params": fit.params}
        description = _describe(fit)
        if fit.memory is not None:
            arrays["memory"], description["memory"] = describe_memory(fit.memory)
        write_tree(path, arrays, {"fit": description})
    elif isinstance(fit, Predictor):
        arrays, description = describe_predictor(fit)
        description["structure"] = _describe_structure(fit.structure)
        description["quadrature"] = _value(fit.quadrature)
        write_tree(path, arrays, {"predictor": description})
    else:
        write_tree(path, fit)


def load(
    path: str | os.PathLike[str],
    like: Any = None,
    *,
    model: Callable[..., Any] | None = None,
    guide: GPGuide | None = None,
    hyper_guide: Callable[..., Any] | None = None,
    rule: SiteRule | None = None,
    quadrature: Quadrature | None = None,
    objective: Objective | None = None,
) -> Any:
    """Loads what :func:`save` wrote.

    Args:
      path: the file.
      like: a state of the same fit, such as ``svi.init(key, X, y)``, if a state or a result is
        loaded; the arrays are put into its structure.
      model: the NumPyro model, if a fit is loaded. A predictor can be loaded without one, to
        predict single GP sites at their own inputs.
      guide: the guide of the fit, where it is one of your own.
      hyper_guide: its guide of hyperparameters, where that is not one of NumPyro's classes.
      rule: its site rule, where that is one of your own.
      quadrature: its quadrature rule, where that is one of your own.
      objective: its objective, where that is one of your own.

    Returns:
      A :class:`~numpyro_tsvgp.Fit` with ``model``, a predictor, a pytree like ``like``, or nested
      dicts of arrays. The fit predicts; diagnostics need ``fit.with_data(X, y)``.

    Raises:
      ValueError: if the file is damaged, is not a fit, or belongs to another fit.

    Examples:
      >>> import jax.numpy as jnp, pathlib, tempfile
      >>> from numpyro_tsvgp import load, save
      >>> path = pathlib.Path(tempfile.mkdtemp()) / "arrays.npz"
      >>> save(path, {"mean": jnp.array([1.0, 2.0])})
      >>> load(path)["mean"].tolist()
      [1.0, 2.0]
    """
    meta = read_meta(path) if like is None else {}
    if "predictor" in meta:
        about = meta["predictor"]
        if quadrature is None:
            quadrature = _rebuild("quadrature", about["quadrature"])
        structure = _structure(about["structure"])
        return rebuild_predictor(read_tree(path), about, structure, quadrature, model)
    if model is None:
        return read_tree(path, like)
    description = read_meta(path).get("fit")
    if description is None:
        raise ValueError(
            f"'{path}' holds a state or a result and not a fit: load it with "
            "like=svi.init(...), or save result.fit in its place."
        )
    try:
        return _rebuilt(
            description,
            model,
            read_tree(path),
            given={"rule": rule, "quadrature": quadrature, "objective": objective},
            guide=guide,
            hyper_guide=hyper_guide,
        )
    except (AttributeError, KeyError, TypeError) as error:  # a stranger's file
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"'{path}' is not a complete numpyro_tsvgp fit: its description cannot be followed "
            f"({reason})."
        ) from error


def _rebuilt(
    description: Mapping[str, Any],
    model: Callable[..., Any],
    arrays: dict[str, Any],
    *,
    given: Mapping[str, Any],
    guide: GPGuide | None,
    hyper_guide: Callable[..., Any] | None,
) -> Fit:
    params = arrays.get("params", {})
    settings: dict[str, Any] = {
        name: _rebuild(name, description[name]) if value is None else value
        for name, value in given.items()
    }
    return Fit(
        params=params,
        call=None,
        model=model,
        guide=_guide(description["guide"], model, params, hyper_guide) if guide is None else guide,
        structure=_structure(description["structure"]),
        memory=rebuild_memory(arrays.get("memory"), description.get("memory")),
        **settings,
    )


def _describe(fit: Fit) -> dict[str, Any]:
    guide, structure = fit.guide, fit.structure
    options = {
        key: getattr(guide, key)
        for key in ("sites", "markov", "whiten", "learn_inducing", "prefix")
        if hasattr(guide, key)
    }
    return {
        "guide": {
            "class": type(guide).__name__,
            "options": options,
            "hyper_guide": _name(guide.make_hyper_guide),
            "inducing": [name for name in structure.gps if guide.has_inducing(name)],
        },
        "rule": _value(fit.rule),
        "quadrature": _value(fit.quadrature),
        "objective": _value(fit.objective),
        "structure": _describe_structure(structure),
    }


def _describe_structure(structure: Structure) -> dict[str, Any]:
    return {
        **dataclasses.asdict(structure),
        "hyper": [
            list(structure.hyper.names),
            [[list(shape), support] for shape, support in structure.hyper.signature],
            sorted(structure.hyper.sampled),
        ],
    }


def _name(made_by: Callable[..., Any]) -> str:
    return getattr(made_by, "__name__", None) or repr(made_by)


def _value(value: Any) -> Any:
    if value is None:
        return None
    fields = dataclasses.asdict(value) if dataclasses.is_dataclass(value) else {}  # type: ignore[arg-type]
    return {"class": type(value).__name__, "fields": fields}


def _rebuild(name: str, description: Any) -> Any:
    if description is None:
        return None
    kind = _SETTINGS.get(description["class"])
    if kind is None:
        raise ValueError(
            f"The fit was made with {name} {description['class']}, which is not one of "
            f"numpyro_tsvgp's: pass it, as in load(path, model=model, {name}=...)."
        )
    return kind(**description["fields"])


def _guide(
    description: Mapping[str, Any],
    model: Callable[..., Any],
    params: Mapping[str, Any],
    hyper_guide: Callable[..., Any] | None,
) -> GPGuide:
    kind = _GUIDES.get(description["class"])
    if kind is None:
        raise ValueError(
            f"The fit was made with a guide of class {description['class']}, which is not one of "
            "numpyro_tsvgp's: pass one, as in load(path, model=model, guide=guide)."
        )
    name = description["hyper_guide"]
    if hyper_guide is None:
        known = _POINTS.get(name, getattr(autoguide, name, None))
        hyper_guide = known if isinstance(known, type) else None
    if hyper_guide is None:
        raise ValueError(
            f"The fit was made with hyper_guide {name}, which is not one of NumPyro's classes: "
            "pass it, as in load(path, model=model, hyper_guide=...)."
        )
    options = description["options"]
    Z = {
        site: np.asarray(params[f"{site}_{options['prefix']}_inducing"])
        for site in description["inducing"]
    }
    return kind(model, Z or None, hyper_guide=hyper_guide, **options)


def _structure(description: Mapping[str, Any]) -> Structure:
    names, signature, sampled = description["hyper"]
    hyper = HyperSites(
        tuple(names),
        tuple((tuple(shape), support) for shape, support in signature),
        frozenset(sampled),
    )
    return Structure(
        gps=tuple(description["gps"]),
        hyper=hyper,
        below=tuple(description["below"]),
        coordinates=tuple((name, tuple(axes)) for name, axes in description["coordinates"]),
        dim=description["dim"],
        proven=description["proven"],
        reads_sums=description["reads_sums"],
    )
