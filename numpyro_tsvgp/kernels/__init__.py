r"""Covariance functions.

A kernel is an immutable pytree: its hyperparameters are leaves, so it can be built from
``numpyro.param`` and ``numpyro.sample`` values, differentiated, jitted and vmapped.

* ``kernel(X1, X2)`` has shape ``batch + (n1, n2)``, ``kernel.diag(X)`` has shape ``batch + (n,)``.
  Inputs have shape ``(n, d)``, or ``(n,)`` for ``d = 1``.
* The *last* axis of a ``lengthscale`` or ``period``, if there is one, is the input axis, of size 1
  or d. Axes before it are batch axes: ``()`` is isotropic, ``(d,)`` has one lengthscale for each
  input, ``(10, 1)`` is a batch of ten isotropic kernels and ``(10, d)`` of ten others.
* Every other hyperparameter has shape ``batch``. All of them broadcast together.
* ``active_dims`` names the columns of the inputs that the kernel sees, by a number, several, or a
  slice; d is then their number.
* Kernels add and multiply with each other, with numbers or arrays of shape ``batch``, and with
  whatever :func:`as_kernel` takes.
* ``kernel(X, X)``, with the very same object twice, is the covariance of one set of function
  values: squared distances are exactly zero on its diagonal and :class:`White` adds its noise.
* ``kernel.state_space()`` is the form that ``AutoDualGaussian(model, markov=True)`` needs, for
  kernels of one input, the time.
* ``kernel.scaled(X1, X2)`` and ``kernel.noise(X)`` are parts of these that save work where a
  kernel can name them. One that cannot, such as a function of yours, need not.
"""

from numpyro_tsvgp.kernels.base import (
    Constant,
    External,
    Function,
    Kernel,
    NotACovariance,
    Product,
    Scaled,
    Sum,
    White,
    as_kernel,
)
from numpyro_tsvgp.kernels.change import ChangePoint
from numpyro_tsvgp.kernels.discrete import Categorical, Coregion, Group
from numpyro_tsvgp.kernels.linear import ArcCosine, Linear, Polynomial
from numpyro_tsvgp.kernels.mixture import SpectralMixture
from numpyro_tsvgp.kernels.stationary import (
    RBF,
    Cosine,
    Matern12,
    Matern32,
    Matern52,
    Periodic,
    RationalQuadratic,
    Stationary,
)
from numpyro_tsvgp.kernels.trend import IntegratedBrownian

__all__ = [
    "RBF",
    "ArcCosine",
    "Categorical",
    "ChangePoint",
    "Constant",
    "Coregion",
    "Cosine",
    "External",
    "Function",
    "Group",
    "IntegratedBrownian",
    "Kernel",
    "Linear",
    "Matern12",
    "Matern32",
    "Matern52",
    "NotACovariance",
    "Periodic",
    "Polynomial",
    "Product",
    "RationalQuadratic",
    "Scaled",
    "SpectralMixture",
    "Stationary",
    "Sum",
    "White",
    "as_kernel",
]
