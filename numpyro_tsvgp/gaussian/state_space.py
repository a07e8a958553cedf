r"""The contract of a state-space form: a Gaussian process of one input as a Markov chain of states.

A function of time f with a state-space form is one number of a state x of a few,

.. math::
  f(t) = h^\top x(t), \qquad
  x(t_1) = A(t_0, t_1) \, x(t_0) + \mathcal{N}\big(0, Q(t_0, t_1)\big), \qquad
  x(t_0) \sim \mathcal{N}\big(0, C(t_0)\big),

so that a posterior at n times costs O(n). Kernels say theirs in
:meth:`~numpyro_tsvgp.kernels.Kernel.state_space`.

Shapes: ``d`` numbers in a state, a kernel axis ``k`` that is 1 when latent functions share a
kernel, ``b`` times. Axes of states come *first*, ``(d, d, k, b)``: small products are then sums of
long rows, which every machine does fast.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, Self

from jax import Array

__all__ = ["StateSpace"]


class StateSpace(Protocol):
    """A state-space form of a kernel, a pytree whose leaves are functions of hyperparameters."""

    @property
    def dim(self) -> int:
        """The number d of numbers in a state."""
        ...

    def flattened(self, flatten: Callable[[Array], Array]) -> Self:
        """The same with the batch axes of all hyperparameters flattened to the kernel axis."""
        ...

    def emission(self) -> Any:
        """The vector h, shape ``(d, 1)``; of NumPy where it does not depend on hyperparameters."""
        ...

    def covariance(self, t: Array) -> Array:
        """The prior covariance C of the state at times ``(b,)``: ``(d, d, k, b)``."""
        ...

    def step(self, t0: Array, t1: Array) -> tuple[Array, Array]:
        """Transition A and noise Q between times ``(b,)``, later ones second: ``(d, d, k, b)``.

        At equal times they are exactly one and zero.
        """
        ...
