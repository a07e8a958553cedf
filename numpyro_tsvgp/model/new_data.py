"""New data for a fitted model: what their likelihood is, and whether they are what it takes."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import numpy as np
from numpyro.primitives import Messenger

from numpyro_tsvgp.model.arguments import Call
from numpyro_tsvgp.model.data_checks import check_shape, check_values, where_not_finite
from numpyro_tsvgp.model.data_rows import on_device
from numpyro_tsvgp.model.dependence import depends
from numpyro_tsvgp.model.read import Message, Model, Reading, is_observed, read, run_with
from numpyro_tsvgp.model.structure import Structure, hyper_sites

__all__ = ["EachOnce", "Sizes", "check_new_data", "sizes_of"]


class EachOnce(Messenger):
    """A model where each data point counts once, whatever plates say of how many there are.

    A plate of size N that is given a batch M scales it by N / M, so that the batch stands for all
    data. New data stand for themselves.
    """

    def __init__(self, fn: Model | None = None) -> None:
        super().__init__(fn)
        self._ratios: dict[str, float] = {}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EachOnce) and self.fn == other.fn

    def __hash__(self) -> int:
        return hash((EachOnce, self.fn))

    def process_message(self, msg: Message) -> None:
        if msg["type"] == "plate":
            size, batch = msg["args"]
            self._ratios[msg["name"]] = size / batch if batch else 1.0
        elif msg["type"] == "sample" and msg["scale"] is not None:
            frames = [frame.name for frame in msg["cond_indep_stack"]]
            msg["scale"] = msg["scale"] / math.prod(self._ratios.get(name, 1.0) for name in frames)


class Sizes(NamedTuple):
    """What the shapes of new data say, before anything is computed with them.

    Attributes:
      call: the arguments; of all rows, where a plate would draw some.
      rows: rows of each GP site.
      once: whether a plate is larger than the data, and its scale is to be left out.
    """

    call: Call
    rows: dict[str, int]
    once: bool


def sizes_of(model: Model, structure: Structure, call: Call) -> Sizes:
    """Runs a model on the shapes of new data alone.

    Args:
      model: the NumPyro model.
      structure: its structure on the training data.
      call: arguments with new data.

    Returns:
      What was found.

    Raises:
      ValueError: if the model does not take them, or they belong to another model.
    """
    try:
        reading = _abstract(model, call)
    except Exception as error:
        error.add_note(
            f"The model was run on the new data, with arguments {call.describe()}. Pass them as "
            "the model takes them, and let it take the number of data points from them: "
            f"numpyro.plate('data', X.shape[0]).{where_not_finite(call)}"
        )
        raise
    _check_sites(structure, reading)
    drawn = [p for p in reading.plates.values() if len(p["value"]) < p["args"][0]]
    once = False
    if drawn:
        lengths = {leaf.shape[0] for leaf in jax.tree.leaves(call) if np.ndim(leaf)}
        if all(plate["args"][0] in lengths for plate in drawn):  # it draws some of these rows
            call = call.of_all_data()
            reading = _abstract(model, call)
        else:
            once = True
            _check_indices_are_not_used(model, on_device(call), drawn[0])
    return Sizes(call, {name: site.rows for name, site in reading.gps.items()}, once)


def _abstract(model: Model, call: Call) -> Reading:
    found = []

    def run(call: Call) -> None:
        found.append(read(model, call, key=jax.random.key(0), first_rows=True))

    jax.eval_shape(run, call)
    return found[0]


def _check_sites(structure: Structure, reading: Reading) -> None:
    if tuple(reading.gps) != structure.gps:
        raise ValueError(
            f"With the new data the GP sites of the model are {list(reading.gps)}, where the fit "
            f"has {list(structure.gps)}. Pass arguments that make the same model."
        )
    if structure.below:
        raise ValueError(
            f"Site '{structure.below[0]}' is a latent variable that depends on a GP. Its value "
            "was found together with the sites of all data, so that none can be added or taken "
            "out. Put the variable into the likelihood, or fit all data again."
        )
    if not any(is_observed(site) for site in reading.trace.values()):
        raise ValueError(
            "The new data have no observed site, so they say nothing. Pass the observations too, "
            "as in fit.condition(X_new, y_new)."
        )
    differ = [name for name in structure.hyper.names if name not in reading.trace]
    if not differ:
        now = hyper_sites(reading, structure.hyper.names).signature
        pairs = zip(structure.hyper.names, now, structure.hyper.signature, strict=True)
        differ = [name for name, a, b in pairs if a != b]
    if differ:
        raise ValueError(
            f"Site '{differ[0]}' is a latent variable that the new data have in another shape than "
            "the training data, so that the fit does not know its value for them. Data can be "
            "added at fixed hyperparameters only: make it a GP (kernels.Group for groups), or fit "
            "all data again."
        )


def _check_indices_are_not_used(model: Model, call: Call, plate: Message) -> None:
    """Rows that a plate draws out of more than there are would be other rows than meant."""
    name, (size, batch) = plate["name"], plate["args"]
    start = np.arange(batch)

    def data(indices: Any) -> list[Any]:
        reading = read(model, call, values={name: indices}, key=jax.random.key(0))
        values = {**reading.pinned, **{k: reading.trace[k]["value"] for k in reading.gps}}
        trace = run_with(model, call, {**values, name: indices})
        inputs = [site.gp.X for site in reading.gps.values()]
        return inputs + [s["fn"].log_prob(s["value"]) for s in trace.values() if is_observed(s)]

    if any(jax.tree.leaves(depends(data, jax.numpy.asarray(start)))):
        raise ValueError(
            f"Plate '{name}' draws {batch} of {size} rows, and the model indexes its arguments "
            "with them, but the new data have another number of rows. Give the plate the number "
            "of rows that are there, as in numpyro.plate('data', X.shape[0], subsample_size=...)."
        )


def check_new_data(reading: Reading) -> None:
    """Whether new data are what the model takes.

    Args:
      reading: a reading of the model at the new data.

    Raises:
      ValueError: if data have another shape than their distribution, inputs are not finite, or data
        are missing or outside of the support.
    """
    for name, site in reading.trace.items():
        if is_observed(site):
            check_shape(name, site, reading)
    check_values(reading)
