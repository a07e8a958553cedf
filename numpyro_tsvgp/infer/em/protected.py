"""The care that a run takes, for loops that a user writes."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Self

from jax import Array

from numpyro_tsvgp.gaussian.linalg import blas_threads
from numpyro_tsvgp.infer.em.checks import check_state
from numpyro_tsvgp.infer.em.run import count_points, settled
from numpyro_tsvgp.infer.em.warmup import overshoots
from numpyro_tsvgp.infer.feed.arrivals import Arrivals
from numpyro_tsvgp.infer.state import TSVGPState
from numpyro_tsvgp.model.arguments import Call

if TYPE_CHECKING:
    from numpyro_tsvgp.infer.em.driver import Driver

__all__ = ["Protected"]

# So many updates are watched for steps that go too far, as in a run.
_WATCHED = 10


class Protected:
    """A context for a loop of updates, with the care that ``run`` takes.

    Args:
      driver: the driver.

    Examples:
      >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist, optax
      >>> from numpyro_tsvgp import GP, TSVGP, AutoDualGaussian, kernels
      >>> def model(X, y=None):
      ...     f = numpyro.sample("f", GP(kernels.RBF(0.3), X))
      ...     with numpyro.plate("data", X.shape[0]):
      ...         numpyro.sample("y", dist.Normal(f, 0.3), obs=y)
      >>> X = jnp.linspace(0.0, 1.0, 20)
      >>> svi = TSVGP(model, AutoDualGaussian(model, inducing=X[::3]), optax.adam(0.01))
      >>> state = svi.init(jax.random.key(0), X, jnp.sin(6.0 * X))
      >>> with svi.protected() as loop:
      ...     for _ in range(3):
      ...         state, loss = loop.update(state, X, jnp.sin(6.0 * X))
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._arrivals = Arrivals(driver.model)
        self._stack = ExitStack()
        self._start: tuple[TSVGPState, Call] | None = None
        self._losses: list[float] = []
        self._updates = 0

    def __enter__(self) -> Self:
        self._stack.enter_context(blas_threads())
        return self

    def __exit__(self, *exception: Any) -> None:
        self._stack.close()

    def update(self, state: TSVGPState, *args: Any, **kwargs: Any) -> tuple[TSVGPState, Array]:
        """One EM iteration, as :meth:`Driver.update`, compiled and watched.

        Where one of the first ten losses is out of proportion, the E-steps overshot. Then sites
        are brought near their optimum by shorter steps, from the state and the batch of the first
        call, and the update is taken from there.

        Args:
          state: the current state.
          *args: arguments of the model; they may change from one update to the next.
          **kwargs: keyword arguments of the model.

        Returns:
          The new state and the loss.

        Raises:
          ValueError: if a value of the data is missing or outside of its support.
        """
        driver = self._driver
        check_state(driver, state)
        prepared = self._arrivals.prepare(Call(args, {**driver.static_kwargs, **kwargs}))
        call = self._arrivals.accept(prepared, self._updates)
        new, loss = driver.compiled_update(state, call)
        if self._updates == 0 and int(state.step) == 0:
            self._start = state, call
        self._updates += 1
        if self._start is not None and len(self._losses) < _WATCHED:
            self._losses.append(float(loss))
            first, batch = self._start
            points, subsampling = count_points(driver, batch)
            if overshoots(self._losses, points, subsampled=subsampling > 1):
                self._start = None
                return driver.compiled_update(settled(driver, first, batch), call)
        return new, loss
