"""What a fit is: the model, how it was fitted, what was found, and the data."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import jax
from jax import Array

from numpyro_tsvgp.gaussian.quadrature import Nodes, Quadrature
from numpyro_tsvgp.infer.guides.guide import GPGuide
from numpyro_tsvgp.infer.guides.hyper import HyperGuide, Params
from numpyro_tsvgp.infer.steps.density import nodes_of, refreshed
from numpyro_tsvgp.infer.steps.objective import Bound, Objective
from numpyro_tsvgp.infer.steps.rules import NaturalGradient, SiteRule
from numpyro_tsvgp.model.arguments import Call
from numpyro_tsvgp.model.processes import is_divided, rows_here
from numpyro_tsvgp.model.read import Reading
from numpyro_tsvgp.model.structure import Structure

if TYPE_CHECKING:
    from numpyro_tsvgp.infer.replay import Memory

__all__ = ["Fitted"]


@dataclass(frozen=True)
class Fitted:
    """The parts of a fit, its data, and its hyperparameters.

    What can be asked of it is :class:`~numpyro_tsvgp.Fit`, which is the only one of its kind and
    describes the fields.
    """

    params: dict[str, Any]
    call: Call | None
    model: Callable[..., Any]
    guide: GPGuide
    structure: Structure
    rule: SiteRule = NaturalGradient()
    quadrature: Quadrature | None = None
    objective: Objective = Bound()
    memory: Memory | None = None

    # ---- data --------------------------------------------------------------------------------

    @property
    def data(self) -> Call:
        """The arguments with the training data.

        Raises:
          ValueError: if the fit does not have them, or has a part of them.
        """
        if self.call is None:
            raise ValueError(
                "This fit is without its training data, as fits that were loaded and those of "
                "streams and batches are. Leaving points out, ArviZ objects and hyperparameter "
                "posteriors need them: fit.with_data(X, y)."
            )
        if is_divided(self.call):
            raise ValueError(
                f"The training data {self.call.describe()} of this fit are divided among "
                f"{jax.process_count()} processes, and a process uses its fit by itself. Pass the "
                "inputs to predict at, or use the rows that this process has: "
                "fit.of_this_process(). The bound of all rows is svi.evaluate(state, ...)."
            )
        return self.call

    def of_this_process(self) -> Self:
        """The same fit with the rows of the data that this process has, each counted once.

        Where the data are divided among processes, what is asked of a fit is computed by the
        process that asks, with its own copy of the parameters: marginals, draws, leave-one-out
        densities and ArviZ objects of its rows. No process waits for another.

        Returns:
          The fit; this one if its data are not divided.

        Raises:
          ValueError: if the model samples a latent variable for each row, below a GP.
        """
        if self.call is None or not is_divided(self.call):
            return self
        if self.structure.below:
            raise ValueError(
                f"The latent variables {list(self.structure.below)} below the GPs belong to the "
                "rows of all processes, so that the rows of one process are not a part of the fit "
                "by themselves. Pass the inputs to predict at."
            )
        return dataclasses.replace(self, call=rows_here(self.call)[0].of_these_rows())

    def check_has_all_rows(self, what: str) -> None:
        """Whether the data of the fit are all that it was fitted to.

        Args:
          what: what needs them, at the start of a sentence.

        Raises:
          ValueError: if they are the rows of one process or of one batch.
        """
        if self.data.alone:
            raise ValueError(
                f"{what} needs all data, and this fit has the rows of one process or one batch. "
                "Gather all rows in the process that asks, if they fit: fit.with_data(X, y)."
            )

    @property
    def example(self) -> Call | None:
        """Arguments with some of the data that the fit has seen, if it has any."""
        if self.call is not None:
            return self.of_this_process().call
        if self.memory is None:
            return None
        return self.memory.call

    def with_data(self, *args: Any, **kwargs: Any) -> Self:
        """The same fit with its training data, as arguments of the model."""
        return dataclasses.replace(self, call=Call(args, kwargs).on_device())

    def of_all_data(self) -> Self:
        """The same fit for plates that do not draw a subsample but have all of their data."""
        return dataclasses.replace(self, call=self.data.of_all_data())

    def inputs(self, args: tuple[Any, ...], kwargs: Any) -> Call:
        """Arguments to predict at: those given, or those of the training data."""
        return Call(args, kwargs).on_device() if args or kwargs else self.data

    def runs_with(self, args: tuple[Any, ...], kwargs: Any) -> Call:
        """Arguments that the model runs with, of whose rows nothing is kept."""
        example = None if args or kwargs else self.example
        return self.inputs(args, kwargs) if example is None else example

    # ---- what diagnostics are made of --------------------------------------------------------

    @property
    def hyper_guide(self) -> HyperGuide:
        """The guide of the hyperparameters of the training data, of which shapes matter."""
        call = self.data if self.call is None else self.call
        return self.guide.hyper_guide(self.structure.hyper, call)

    def hyper_guide_at(self, call: Call) -> HyperGuide:
        """The guide of the hyperparameters, for predictions at some arguments.

        Latent variables below GPs belong to the training data. Elsewhere they follow from the GPs.
        """
        training = call if self.call is None else self.call
        found = self.guide.hyper_guide(self.structure.hyper, training)
        found.check(self.params)
        return found if call is self.call else found.without(self.structure.below)

    @property
    def hyper(self) -> dict[str, Array]:
        """Point estimates of the sampled hyperparameters: MAP, or the median."""
        return self.hyper_guide.point(self.params)

    def hyper_at(self, call: Call) -> dict[str, Array]:
        """Point estimates for predictions at some arguments; see :meth:`hyper_guide_at`."""
        return self.hyper_guide_at(call).point(self.params)

    def nodes(self, key: Array | None = None) -> Nodes:
        """Nodes of the quadrature of the fit."""
        key = jax.random.key(0) if key is None else key
        return nodes_of(self.structure, self.quadrature, key)

    def read(self, call: Call | None = None, hyper: Params | None = None) -> Reading:
        """The model at given arguments and hyperparameters, by default at those of the fit."""
        call = self.data if call is None else call
        return self.guide.read(call, self.params, self.hyper if hyper is None else hyper)

    def refreshed(self, hyper: Params, steps: int) -> Self:
        """The same fit with sites made anew at given hyperparameters.

        Args:
          hyper: one value of each hyperparameter that the model samples.
          steps: number of site updates at rate 1; with none the sites stay as they are.

        Returns:
          The fit.
        """
        params = refreshed(
            self.guide,
            self.structure,
            self.data,
            self.params,
            hyper,
            self.nodes(),
            rule=self.rule,
            steps=steps,
        )
        return dataclasses.replace(self, params=params)
