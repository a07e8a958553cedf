"""Arguments that code written for NumPyro's SVI passes, taken or refused in words."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from numpyro.infer import Trace_ELBO, TraceMeanField_ELBO

__all__ = ["check_forward_mode", "check_key", "check_loss", "check_static_kwargs"]


def check_loss(loss: Any) -> None:
    """The loss is built in, and the bound that it is stands for what SVI calls Trace_ELBO.

    Args:
      loss: None, or the fourth argument of SVI.

    Raises:
      TypeError: if it is another objective, or another argument of the driver.
    """
    if loss is None or type(loss) in (Trace_ELBO, TraceMeanField_ELBO):
        return
    kind = loss.__name__ if isinstance(loss, type) else type(loss).__name__
    raise TypeError(
        "The loss is built in: minus the evidence lower bound, by quadrature and not by draws, "
        f"for which loss may be Trace_ELBO() but not {kind}. Leave it out; all other settings are "
        "keyword arguments, and another objective of the M-step is objective=."
    )


def check_key(rng_key: Any) -> None:
    """A random key must be one, and not a seed or an argument of the model."""
    if isinstance(rng_key, int | float) or rng_key is None:
        raise TypeError(
            f"rng_key must be a random key, as of jax.random.key(0), got {rng_key!r}. The "
            "arguments are svi.run(rng_key, num_steps, *arguments of the model)."
        )


def check_forward_mode(wanted: bool) -> None:
    """E-steps take the gradient of one number in all values of f, which is reverse mode.

    Args:
      wanted: whether forward mode was asked for.

    Raises:
      ValueError: if so.
    """
    if wanted:
        raise ValueError(
            "forward_mode_differentiation=True cannot be had: an E-step is the gradient of the "
            "likelihood in every value of f, one pass in reverse mode and n passes in forward "
            "mode. In a model with a loop use jax.lax.scan, or fori_loop with fixed limits, which "
            "reverse mode can differentiate, in place of while_loop."
        )


def check_static_kwargs(model: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Keyword arguments that a driver does not know must be those of the model.

    Args:
      model: the NumPyro model.
      given: the arguments by name.

    Raises:
      TypeError: if the model has no such argument.
    """
    try:
        parameters = inspect.signature(model).parameters
    except (TypeError, ValueError):  # a callable that does not say
        return
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return
    unknown = [name for name in given if name not in parameters]
    if unknown:
        raise TypeError(
            f"{unknown} are neither settings of the driver nor arguments of the model, which has "
            f"{list(parameters)}."
        )
