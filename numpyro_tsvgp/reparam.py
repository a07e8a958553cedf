"""Gaussian processes for samplers: a site as white noise and what the kernel makes of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax import Array
from numpyro import handlers
from numpyro.infer.reparam import Reparam

from numpyro_tsvgp.distributions import find_gp, is_masked

__all__ = ["GPReparam", "whiten"]


class GPReparam(Reparam):
    r"""Draws a :class:`~numpyro_tsvgp.GP` as white noise times the factor of its covariance.

    .. math:: f = \mu(X) + L \varepsilon, \qquad \varepsilon \sim \mathcal{N}(0, I), \qquad
        L L^\top = k(X, X) + \epsilon I

    The values of a smooth function at neighbouring inputs are all but equal, so a sampler that
    moves them one by one takes tiny steps; and their scale changes with the hyperparameters. The
    noise has neither problem. The model is the same one: the noise is a site ``{name}_base``, and
    the function becomes a deterministic site of the name that it had, so that samples have both.

    Plates, ``expand``, ``to_event`` and batches of kernels work as they do for the GP itself. A GP
    that is data, or that is masked, has no noise to draw and is refused.

    Args:
      sample_shape: the ``sample_shape`` of ``numpyro.sample``, if it has one and no plate, which
        would take it over, is around it: ``handlers.reparam`` does not pass it on.
        :func:`whiten` finds it by itself.

    Examples:
      >>> import jax.numpy as jnp, numpyro
      >>> from numpyro import handlers
      >>> from numpyro_tsvgp import GP, kernels
      >>> from numpyro_tsvgp.reparam import GPReparam
      >>> def model(X):
      ...     numpyro.sample("f", GP(kernels.RBF(0.3), X))
      >>> noisy = handlers.reparam(model, config={"f": GPReparam()})
      >>> trace = handlers.trace(handlers.seed(noisy, 0)).get_trace(jnp.linspace(0.0, 1.0, 5))
      >>> {name: site["type"] for name, site in trace.items()}
      {'f_base': 'sample', 'f': 'deterministic'}

    References:
      Papaspiliopoulos, Roberts and Sköld, `A General Framework for the Parametrization of
      Hierarchical Models <https://arxiv.org/abs/0708.3797>`_, 2007.
    """

    def __init__(self, sample_shape: tuple[int, ...] = ()) -> None:
        self.sample_shape = tuple(sample_shape)

    def __call__(self, name: str, fn: Any, obs: Array | None) -> tuple[None, Array]:
        gp = find_gp(fn)
        if gp is None:
            raise ValueError(
                f"GPReparam is for GPs, but site '{name}' has the distribution "
                f"{type(fn).__name__}. Leave it out of the config, or use whiten(model), which "
                "takes the GPs and leaves all else."
            )
        if obs is not None:
            raise ValueError(
                f"Site '{name}' is observed: there is nothing to draw, and so nothing for "
                "GPReparam to draw in another way."
            )
        if is_masked(fn):
            raise ValueError(
                f"Site '{name}' is a GP with a mask. What a mask leaves out is the density of the "
                "function, which GPReparam does not evaluate. Move the mask to the likelihood."
            )
        zero = jnp.zeros((), gp.loc.dtype)
        # As many event dimensions as the site has: plates look at the others.
        noise = dist.Normal(zero, zero + 1).expand(fn.shape()).to_event(fn.event_dim)
        noise = numpyro.sample(f"{name}_base", noise, sample_shape=self.sample_shape)
        return None, gp.from_noise(noise)


def whiten(model: Callable[..., Any]) -> Callable[..., Any]:
    """A model that draws its GPs as white noise, for samplers that move their values one by one.

    Every GP that is not data is reparameterized by :class:`GPReparam`; everything else is as it
    was. ``NUTS(whiten(model))`` in place of ``NUTS(model)``, and ``AutoNormal(whiten(model))``
    likewise, is all that there is to write. Samples have the functions under the names that they
    have in ``model``, so that ``Predictive(model, samples)`` works.

    :class:`~numpyro_tsvgp.TSVGP` and its guides do this by themselves: give them ``model``. Inside
    of ``numpyro.contrib.control_flow.scan`` handlers from outside do not see GPs: whiten the
    function that is scanned.

    Args:
      model: a NumPyro model.

    Returns:
      The same model in other coordinates.

    Examples:
      >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
      >>> from numpyro.infer import MCMC, NUTS
      >>> from numpyro_tsvgp import GP, kernels
      >>> from numpyro_tsvgp.reparam import whiten
      >>> def model(X, y=None):
      ...     f = numpyro.sample("f", GP(kernels.RBF(0.3), X))
      ...     with numpyro.plate("data", len(X)):
      ...         numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)
      >>> mcmc = MCMC(NUTS(whiten(model)), num_warmup=5, num_samples=5, progress_bar=False)
      >>> mcmc.run(jax.random.key(0), jnp.linspace(0.0, 1.0, 4), jnp.array([0, 3, 2, 1]))
      >>> mcmc.get_samples()["f"].shape
      (5, 4)
    """
    return handlers.reparam(model, config=_reparam_of)


def _reparam_of(site: dict[str, Any]) -> GPReparam | None:
    # A value that is there already is data, or was put there by a handler closer to the site.
    if site["value"] is not None or find_gp(site["fn"]) is None:
        return None
    return GPReparam(site["kwargs"]["sample_shape"])
