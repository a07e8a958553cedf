r"""The contract of a posterior approximation, which is all that inference knows of it.

An approximation is what a guide keeps of one GP: a frozen pytree of arrays, with no NumPyro in it.
Inference asks it three things. *At the data* and the current hyperparameters it takes E-steps and
gives the marginals and the divergence of the bound (:class:`AtData`). *At any inputs* it gives
marginals and draws. And it says which of its arrays the optimizer may move.

To add one, write a class with these methods, register it as a pytree, and give it to a guide: see
'Add an approximation' in the documentation.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple, Protocol, Self

from jax import Array

from numpyro_tsvgp.gaussian.process import Process
from numpyro_tsvgp.gaussian.quadrature import Marginals
from numpyro_tsvgp.gaussian.whitened import PointSites

__all__ = ["Approximation", "AtData", "Carry", "Joint", "Local", "Noise", "Ready"]


class Local(NamedTuple):
    """The posterior of one GP at some data points, without the prior mean; each ``(p, n)``.

    Attributes:
      mean: posterior mean about the prior mean.
      variance: posterior variance.
      explained: the part of the variance that sites move, :math:`s_i`.
    """

    mean: Array
    variance: Array
    explained: Array


class Noise(NamedTuple):
    """Standard normal numbers for draws of one GP, or their shapes, ``(functions, ...)`` each.

    Attributes:
      inner: for the variables that the approximation itself is about, such as inducing values.
      rest: for what is left of f given those.
    """

    inner: Any
    rest: Any


class Joint(Protocol):
    """The joint posterior of function values at some inputs, ready to be drawn from: a pytree."""

    @property
    def mean(self) -> Array:
        """Posterior mean with the prior mean, ``(functions, n)``."""
        ...

    @property
    def variance(self) -> Array:
        """Posterior variance, ``(functions, n)``."""
        ...

    def noise_shape(self) -> Noise:
        """Shapes of the noise of one draw."""
        ...

    def draw(self, noise: Noise) -> Array:
        """Draws ``(..., functions, n)`` from noise with any leading axes."""
        ...

    def log_prob(self, values: Array) -> Array:
        """Log density of values ``(..., functions, n)``, by function: ``(..., functions)``."""
        ...


class Carry(Protocol):
    """What a run of E-steps carries from one to the next, at fixed hyperparameters: a pytree."""

    def add(self, sites: PointSites, at: Any) -> Self:
        """The same with sites of the data points ``at`` added."""
        ...

    def blend(self, sites: PointSites, at: Any, rate: Any) -> Self:
        """The same after a step of size ``rate`` towards sites of the data points ``at``."""
        ...


class AtData(Protocol):
    """One approximation at the training inputs and the current hyperparameters.

    Everything that depends on the hyperparameters alone, such as the factor of a prior covariance,
    is computed when this is made, once for all that follows.
    """

    @property
    def features(self) -> Any:
        """Features of the training inputs, as sums over sites want them."""
        ...

    @property
    def process(self) -> Process:
        """The prior at the training inputs."""
        ...

    def start(self) -> Any:
        """What E-steps start from: a :class:`Carry`."""
        ...

    def posterior(self, carry: Any) -> Any:
        """The posterior of a carry, in whatever form :meth:`local` and site rules want it."""
        ...

    def local(self, posterior: Any) -> Local:
        """The posterior at the data points."""
        ...

    def point_sites(self, carry: Any) -> PointSites | None:
        """The site of each data point without the prior mean; None where sums are all there is."""
        ...

    def divergence(self, posterior: Any) -> Array:
        """The divergence of a posterior from the prior, summed over latent functions."""
        ...

    def count_floored(self, posterior: Any) -> Array:
        """How many variances of :meth:`local` rounded to nothing and were raised."""
        ...

    def keep(self, carry: Any) -> Approximation:
        """The approximation after E-steps."""
        ...

    def bound(self) -> tuple[Marginals, Array]:
        """Centred marginals and divergence, with what is kept held and the prior left free."""
        ...

    def fresh_bound(self, kept: Any) -> tuple[Marginals, Array]:
        """The same of what :meth:`keep` made of E-steps here and now, which is constant."""
        ...


class Ready(Protocol):
    """A posterior of which all is computed that does not depend on new inputs: a pytree.

    Its methods take the prior at the inputs to predict at and factorise nothing.
    """

    def marginals(self, process: Process) -> Local:
        """The posterior at the inputs of ``process``, in bounded memory."""
        ...

    def means(self, process: Process) -> Array:
        """Its mean alone, about the prior mean, ``(functions, n)``, which may be cheaper."""
        ...

    @property
    def inducing(self) -> Array:
        """The inputs whose function values carry what data say of f."""
        ...

    def weights(self, noise: Noise, values: Array) -> Array:
        r"""What makes draws of the posterior of draws of the prior, without their means.

        .. math:: f(x) = f_0(x) + k(x, Z) \, a, \qquad a = a(\varepsilon, f_0(Z))

        Args:
          noise: standard normal numbers :math:`\varepsilon`, two arrays of shape
            ``(..., functions, m)``: for the function values there, and for the jitter that their
            prior covariance has and a draw of the prior has not.
          values: the draws :math:`f_0(Z)` of the prior at :attr:`inducing`, of that shape.

        Returns:
          The weights a, of that shape.

        Raises:
          ValueError: in words, where the posterior is not about function values at some inputs.
        """
        ...


class Approximation(Protocol):
    """A Gaussian posterior of the latent functions of one GP: a frozen dataclass and a pytree.

    Attributes:
      optimized: names of the fields that an optimizer may own. The others are set by E-steps.
      keeps_sums: whether E-steps carry sums over sites, as some site rules need.
      keeps_points: whether they carry a site for each data point, as others need.
      follows_inputs: whether it keeps the training inputs, so that :meth:`synced` has to follow
        hyperparameters that move them.
    """

    optimized: ClassVar[frozenset[str]]
    keeps_sums: ClassVar[bool]
    keeps_points: ClassVar[bool]
    follows_inputs: ClassVar[bool]

    @property
    def inducing(self) -> Array:
        """The inputs whose function values the approximation is about."""
        ...

    @property
    def mean_inputs(self) -> Array:
        """Inputs where the prior mean must be known, because sites are statements about f there."""
        ...

    @property
    def known_means(self) -> Array:
        """The prior mean there, to be used if the model knows its mean at other inputs alone."""
        ...

    @property
    def largest_factor(self) -> int:
        """The size of the largest matrix that is factorised."""
        ...

    @property
    def input_columns(self) -> int:
        """How many columns its inputs have."""
        ...

    def at_data(self, process: Process) -> AtData:
        """At the training inputs, differentiable in everything and as often as one likes."""
        ...

    def at_data_for_gradient(self, process: Process) -> AtData:
        """At the training inputs for one first derivative, which may be had more cheaply."""
        ...

    def at_new_data(self, process: Process) -> AtData:
        """At inputs of data points that it has not seen.

        ``start()`` is what earlier data said, ``posterior`` and ``local`` are at the new points
        alone, ``carry.add(sites, at.features)`` adds sites of theirs, and ``keep(carry)`` is the
        approximation with them in it.
        """
        ...

    def without_points(self, process: Process, sites: PointSites) -> Self:
        """The approximation without some of its data points.

        Args:
          process: the prior at them.
          sites: what they contributed, about the function without its mean.

        Raises:
          ValueError: if what is kept shows that they are not there.
        """
        ...

    def with_inducing(self, process: Process, inducing: Array, prior_mean: Array) -> Self:
        """The approximation by the values of f at other inducing inputs.

        Args:
          process: the prior.
          inducing: the new inducing inputs, any number of them.
          prior_mean: the prior mean there.

        Raises:
          ValueError: if it has no inducing inputs.
        """
        ...

    def covariance(self, one: Process, other: Process) -> Array:
        """The posterior covariance that sites of new points would act through.

        Args:
          one: the prior at some inputs.
          other: the prior at some other inputs.

        Returns:
          Covariances of shape ``(functions, n1, n2)``. With them one can add points to the
          posterior at other inputs and leave the approximation as it is.
        """
        ...

    def synced(self, process: Process) -> Self:
        """The same after hyperparameters moved the training inputs or the mean there."""
        ...

    def marginals(self, process: Process) -> Local:
        """The posterior at the inputs of ``process``, in bounded memory."""
        ...

    def ready(self, process: Process) -> Ready:
        """The posterior with all computed that the inputs of ``process`` do not enter."""
        ...

    def marginals_at_data(self, process: Process) -> Local:
        """The posterior at the training inputs, which ``process`` must have, in bounded memory."""
        ...

    def kl(self, process: Process) -> Array:
        """The divergence from the prior, summed over latent functions."""
        ...

    def joint(self, process: Process) -> Joint:
        """The joint posterior at the inputs of ``process``."""
        ...

    def joint_factor(self, process: Process) -> int:
        """The size of the largest matrix that :meth:`joint` factorises; 0 if there is none."""
        ...

    def noise_shape(self, process: Process) -> Noise:
        """Shapes of the noise of one draw at the inputs of ``process``."""
        ...

    def draw_marginally(self, process: Process, noise: Noise) -> Array:
        """Draws whose correlation may be partial but whose marginals are exact, cheaply."""
        ...

    def log_ratio(self, process: Process, noise: Noise) -> Array:
        r"""Log density of the prior over that of the posterior at draws: shape of the draws.

        .. math:: \log p(u) - \log q(u), \qquad f = \mathrm{draw}(\mathrm{noise})
        """
        ...

    def without_data(self) -> Approximation:
        """The prior, as an approximation of the same inputs."""
        ...

    def responses(self, process: Process) -> Array:
        """How the mean of what it is about answers to each data point, ``(functions, n, m)``."""
        ...

    def factors(self, process: Process) -> Any:
        """Everything that is factorised, to see whether it is finite."""
        ...
