"""Optimizers of the M-step: NumPyro's as they are, optax's with everything they ask for.

optax is imported where it is used: a tenth of a second that users of NumPyro's do not pay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
from jax import Array
from jax.example_libraries import optimizers
from numpyro.optim import _NumPyroOptim

if TYPE_CHECKING:
    import optax

__all__ = ["Optax", "as_optimizer", "evaluates_once"]


class Optax(_NumPyroOptim):
    """An optax transformation behind NumPyro's optimizer interface.

    Unlike :func:`numpyro.optim.optax_to_numpyro` it hands the value, the gradient and the
    function itself to the transformation, as line searches need (``optax.lbfgs``).

    Args:
      transformation: the optax transformation.
    """

    def __init__(self, transformation: optax.GradientTransformation) -> None:
        import optax

        self.transformation = optax.with_extra_args_support(transformation)

        def init(params: Any) -> tuple[Any, Any]:
            return params, self.transformation.init(params)

        def update(i: Any, grads: Any, state: Any) -> Any:
            raise NotImplementedError("use eval_and_update")

        super().__init__(lambda: (init, update, lambda state: state[0]))

    def eval_and_update(
        self,
        fn: Callable[[Any], tuple[Array, Any]],
        state: Any,
        forward_mode_differentiation: bool = False,
    ) -> tuple[tuple[Array, Any], Any]:
        import optax

        i, (params, opt_state) = state
        (value, aux), grads = jax.value_and_grad(fn, has_aux=True)(params)
        more = {"value": value, "grad": grads, "value_fn": lambda p: fn(p)[0]}
        updates, opt_state = self.transformation.update(
            grads, opt_state, params, **({} if self.gradient_is_enough(state) else more)
        )
        return (value, aux), (i + 1, (optax.apply_updates(params, updates), opt_state))

    def gradient_is_enough(self, state: Any) -> bool:
        """Whether a step asks for nothing but the gradient: neither its value nor the function."""
        _, (params, opt_state) = state
        try:
            jax.eval_shape(self.transformation.update, params, opt_state, params)
        except TypeError:  # an argument is missing
            return False
        return True

    def restart(self, state: Any) -> Any:
        """Forgets the curvature of another objective: L-BFGS starts afresh in each M-step."""
        i, (params, opt_state) = state
        return (i, (params, self.transformation.init(params))) if _is_lbfgs(opt_state) else state


def _is_lbfgs(opt_state: Any) -> bool:
    import optax

    leaves = jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, optax.ScaleByLBFGSState))
    return any(isinstance(x, optax.ScaleByLBFGSState) for x in leaves)


def evaluates_once(optim: _NumPyroOptim, state: Any) -> bool:
    """Whether an optimizer takes its steps from one value and gradient each."""
    if isinstance(optim, Optax):
        return optim.gradient_is_enough(state)
    return type(optim).eval_and_update is _NumPyroOptim.eval_and_update


def as_optimizer(optim: Any) -> _NumPyroOptim | None:
    """An optimizer with NumPyro's interface from anything that SVI takes, or None from None."""
    if optim is None or isinstance(optim, _NumPyroOptim):
        return optim
    if isinstance(optim, optimizers.Optimizer):
        return _NumPyroOptim(lambda: optim)
    import optax

    if isinstance(optim, optax.GradientTransformation):
        return Optax(optim)
    raise TypeError(
        "optim must be a numpyro.optim optimizer (numpyro.optim.Adam(0.1)), an optax "
        "transformation (optax.adam(0.1)) or None, got "
        f"{optim.__name__ + ' itself, not a call of it' if callable(optim) else type(optim)}."
    )
