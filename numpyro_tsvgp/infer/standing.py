"""What was right where a fit started and may not be where it stands.

Approximations that hold for some hyperparameters alone are looked at before a fit. Hyperparameters
move. So they are looked at again wherever a fit is handed on: at the end of a run, by
``svi.fit``, in an audit, for new data, and for draws of hyperparameters by a sampler.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from numpyro_tsvgp.gaussian.caller import stack_level
from numpyro_tsvgp.infer.fit import Fit
from numpyro_tsvgp.infer.guides.hyper import Params
from numpyro_tsvgp.model.arguments import Call
from numpyro_tsvgp.model.density_checks import leaves_range
from numpyro_tsvgp.model.read import Reading
from numpyro_tsvgp.model.validation import unvalidated

__all__ = ["doubts", "warn_of_doubts"]

# How many values of hyperparameters that are distributions are looked at.
_VALUES = 8
# Rows up to which the parameters of a likelihood are looked at, and the name of that doubt.
_ROWS = 20_000
_RANGE = "the range of a parameter"


def doubts(fit: Fit, samples: Params | None = None, *, at_point: bool = False) -> list[str]:
    """What the approximations of a fit are no longer good for, one sentence each.

    Args:
      fit: the fit.
      samples: draws of the hyperparameters, with one leading axis; those of the guide's own
        distribution if there are none.
      at_point: whether to look at their point estimate or median alone.

    Returns:
      The sentences; none where values are traced or on other hosts, or without inputs to look at.
    """
    if fit.example is None:
        return []
    if not all(map(_is_here, jax.tree.leaves((fit, samples)))):
        return []
    with unvalidated():  # which would say less of what to do
        return list(_doubts(fit, _values(fit, samples, at_point)).values())


def _doubts(fit: Fit, values: Iterable[Params]) -> dict[str, str]:
    found: dict[str, str] = {}
    for hyper in values:
        assert fit.example is not None
        reading, call = fit.guide.read_all(fit.example, fit.params, hyper)
        if _RANGE not in found:
            found |= _doubted_range(fit, reading, call)
        for name, (process, approximation) in fit.guide.latents(reading, fit.params).items():
            words = None if name in found else fit.guide.doubt(name, process, approximation)
            if words is not None:
                found[name] = words
    return found


def _is_here(leaf: Any) -> bool:
    """Whether a value is known, and known to this process."""
    if isinstance(leaf, jax.core.Tracer):
        return False
    return not isinstance(leaf, jax.Array) or leaf.is_fully_addressable


def _doubted_range(fit: Fit, reading: Reading, call: Call) -> dict[str, str]:
    """Whether a parameter of the likelihood has left its range, under the name of that doubt."""
    if max(site.rows for site in reading.gps.values()) > _ROWS:
        return {}
    outside = leaves_range(fit.model, reading, call, fit.structure.below)
    if outside is None:
        return {}
    return {
        _RANGE: f"{outside} leaves its range at the hyperparameters of the fit, for values of the "
        "GPs that their prior calls likely. Its density there is none: NumPyro goes on with some "
        "number. Keep the hyperparameter in its range, as in numpyro.param('w', 0.5, "
        "constraint=dist.constraints.unit_interval), or give it a prior on that range."
    }


def _values(fit: Fit, samples: Params | None, at_point: bool) -> Iterable[Params]:
    if samples:
        count = len(next(iter(samples.values())))
        for i in np.unique(np.linspace(0, count - 1, min(count, _VALUES)).astype(int)):
            yield {name: value[i] for name, value in samples.items()}
        return
    assert fit.example is not None
    guide = fit.guide.hyper_guide(fit.structure.hyper, fit.example)
    yield guide.point(fit.params)
    if not (guide.is_point or at_point):
        for key in jax.random.split(jax.random.key(0), _VALUES):
            yield guide.draw(key, fit.params, fit.example)[0]


def warn_of_doubts(fit: Fit, samples: Params | None = None) -> None:
    """Says what the approximations of a fit are no longer good for; see :func:`doubts`."""
    for words in doubts(fit, samples):
        warnings.warn(words, stacklevel=stack_level())
