"""Rows of data on several devices and hosts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax import Array
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from numpyro_tsvgp.infer.files.fingerprint import fingerprint
from numpyro_tsvgp.model.arguments import Call, has_explicit_axes
from numpyro_tsvgp.model.processes import copy_here, is_divided

if TYPE_CHECKING:
    from numpyro_tsvgp.infer.em.driver import Driver

__all__ = [
    "agreed_arrival",
    "agreed_error",
    "check_axes",
    "check_is_shared",
    "check_same_everywhere",
    "placed",
    "sum_over_processes",
]

# Bytes of an error message that processes tell one another.
_MESSAGE = 2000


def placed(call: Call, sharding: Any) -> Call:
    """Arguments with their rows spread over devices.

    Args:
      call: the arguments, with the rows of this process.
      sharding: a ``jax.sharding.NamedSharding`` whose first axis is that of rows, or None.

    Returns:
      The arguments. Arrays as long as the longest have their rows spread, others stay, and so do
      those that are divided among processes already.

    Raises:
      ValueError: if the rows cannot be split evenly.
    """
    if sharding is None or is_divided(call):
        return call
    leaves = jax.tree.leaves(call)
    rows = max((leaf.shape[0] for leaf in leaves if leaf.ndim), default=0)
    local = len(sharding.addressable_devices)
    if rows % local:
        raise ValueError(
            f"A batch of {rows} rows cannot be split evenly over {local} devices. Let the loader "
            "drop the last batch if it is smaller, or choose a batch size that can be split."
        )

    def place(leaf: Any) -> Any:
        if not leaf.ndim or leaf.shape[0] != rows:
            return leaf
        return jax.make_array_from_process_local_data(sharding, np.asarray(leaf))

    return jax.tree.map(place, call)


def check_is_shared(call: Call) -> None:
    """Where there are several processes, the data of a run must be those of all of them.

    Without that each process would fit its own rows as if there were no others.

    Args:
      call: the arguments of an update.

    Raises:
      ValueError: if all arrays are those of this process alone.
    """
    leaves = [leaf for leaf in jax.tree.leaves(call) if isinstance(leaf, Array)]
    alone = all(leaf.is_fully_addressable for leaf in leaves if not _is_traced(leaf))
    if jax.process_count() > 1 and alone:
        raise ValueError(
            f"There are {jax.process_count()} processes, and the data {call.describe()} are those "
            "of one of them, so that each would make a fit of its own. Pass sharding=NamedSharding("
            'mesh, PartitionSpec("rows")) with a mesh of the devices of all processes, or arrays '
            "from jax.make_array_from_process_local_data."
        )


def _is_traced(leaf: Any) -> bool:
    return isinstance(leaf, jax.core.Tracer)


def check_axes(call: Call) -> None:
    """Arrays inside of a user's ``jax.jit`` must not be on a mesh with explicit axes.

    Raises:
      ValueError: if one is.
    """
    for leaf in jax.tree.leaves(call):
        mesh = getattr(getattr(jax.typeof(leaf), "sharding", None), "mesh", None)
        if mesh is not None and has_explicit_axes(mesh):
            raise ValueError(
                "The data are on a mesh with explicit axes, as jax.make_mesh makes them, whose "
                "types a model would have to follow. Make it with jax.make_mesh(shape, names, "
                "axis_types=(jax.sharding.AxisType.Auto,) * len(names)); svi.init, svi.run and "
                "fits do so by themselves."
            )


def agreed_error(message: str) -> str:
    """The error message of the first process that has one, the same for all of them.

    Where there are several processes all must call it, since it waits for the others.

    Args:
      message: the message of this process; empty if all is well.

    Returns:
      A message, empty if all is well everywhere.
    """
    if jax.process_count() == 1:
        return message
    from jax.experimental.multihost_utils import process_allgather

    if not np.asarray(process_allgather(np.array(bool(message)))).any():
        return ""
    text = np.zeros(_MESSAGE, np.uint8)
    said = message.encode()[:_MESSAGE]
    text[: len(said)] = np.frombuffer(said, np.uint8)
    everything = np.asarray(process_allgather(text))
    for process, one in enumerate(everything):
        found = one.tobytes().rstrip(b"\0").decode(errors="ignore")
        if found:
            return f"{found} (found by process {process})"
    return ""


def agreed_arrival(status: str, message: str = "", rows: int = 0) -> str:
    """What all processes say of the next batch, so that none waits for one that has stopped.

    Args:
      status: ``"batch"`` if there is one, ``"end"`` if there are no more, ``"error"``.
      message: the error.
      rows: how many rows the batch has.

    Returns:
      The error message of the first process that has one; empty if all is well.

    Raises:
      ValueError: if the batches of one process end before those of the others, or have another
        number of rows.
    """
    if jax.process_count() == 1:
        return message
    from jax.experimental.multihost_utils import process_allgather

    code = ["batch", "end", "error"].index(status)
    everyone = np.asarray(process_allgather(np.array([code, rows])))
    if (everyone[:, 0] == 2).any():
        return agreed_error(message)
    if (everyone != everyone[0]).any():
        ended = np.flatnonzero(everyone[:, 0] == 1).tolist()
        raise ValueError(
            f"The batches of processes {ended} ended before those of the others."
            if ended
            else f"The processes have batches of {everyone[:, 1].tolist()} rows, which must be as "
            "many in each. Let each loader have as many rows, and drop what is left over."
        )
    return ""


def sum_over_processes(tree: Any) -> Any:
    """Sums of arrays that each process has its own values of.

    Where there are several processes all must call it, since it waits for the others.

    Args:
      tree: a pytree of arrays of this process.

    Returns:
      The sums, in each process.
    """
    if jax.process_count() == 1:
        return tree
    first = {device.process_index: device for device in reversed(jax.devices())}
    devices = np.array([first[process] for process in range(jax.process_count())])
    mesh = Mesh(devices, ("processes",), axis_types=(AxisType.Auto,))
    spread, everywhere = (NamedSharding(mesh, PartitionSpec(*a)) for a in (["processes"], []))
    parts = jax.tree.map(
        lambda leaf: jax.make_array_from_process_local_data(spread, np.asarray(leaf)[None]), tree
    )
    total = jax.jit(lambda parts: jax.tree.map(lambda x: x.sum(0), parts), out_shardings=everywhere)
    return copy_here(total(parts))


def check_same_everywhere(driver: Driver, rng_key: Array) -> None:
    """Random keys, inducing inputs, model and settings must be the same in all processes.

    Args:
      driver: the driver.
      rng_key: the random key of a fit.

    Raises:
      ValueError: if one is not.
    """
    if jax.process_count() == 1:
        return
    from jax.experimental.multihost_utils import process_allgather

    parts = {
        "random keys": rng_key,
        "inducing inputs": driver.guide.inducing,
        "models": driver.model,
        "settings": (driver.site_lr, driver.e_steps, driver.m_steps, driver.optim),
    }
    mine = np.array([int(fingerprint(part)[:7], 16) for part in parts.values()], np.int32)
    everyone = np.asarray(process_allgather(mine))
    other = [
        name for name, row in zip(parts, everyone.T, strict=True) if len(set(row.tolist())) > 1
    ]
    if other:
        raise ValueError(
            f"The {' and '.join(other)} of the processes are not the same. Each process must make "
            "them from the same seed and the same data: compute them in one, and send them to the "
            "others with jax.experimental.multihost_utils.broadcast_one_to_all."
        )
