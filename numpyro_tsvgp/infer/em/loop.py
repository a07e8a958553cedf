"""The loop around a step: progress, checkpoints, interrupts, and an end that explains itself."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tqdm
from jax import Array

from numpyro_tsvgp.gaussian.caller import stack_level
from numpyro_tsvgp.infer.em.interrupts import Interrupts
from numpyro_tsvgp.infer.feed.batches import BatchesEnded, Feed
from numpyro_tsvgp.infer.files.checkpoint import read_meta, read_tree, write_tree
from numpyro_tsvgp.infer.state import FitError, TSVGPRunResult, TSVGPState

__all__ = ["all_finite", "run_steps"]

# So many rejected updates in a row will not be followed by a good one.
_HOPELESS = 20
# So many losses are looked at one by one, as they come; later ones a twentieth of the run at once.
_WATCHED = 10


def all_finite(tree: Any) -> Array:
    """Whether every floating-point number in a pytree is finite."""
    floats = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(jnp.result_type(x), jnp.floating)]
    return jnp.array([jnp.isfinite(x).all() for x in floats]).all()


def run_steps(
    step: Callable[[TSVGPState], tuple[TSVGPState, Array]],
    state: TSVGPState,
    num_steps: int,
    *,
    result: Callable[[TSVGPState, Any], TSVGPRunResult],
    usable: Callable[[TSVGPState], bool],
    diagnose: Callable[[TSVGPState], str],
    judge: Callable[[Array], str | None] = lambda losses: None,
    careful_start: Callable[[Sequence[float]], TSVGPState | None] = lambda losses: None,
    fingerprint: Mapping[str, str],
    feed: Feed,
    interrupts: Interrupts,
    progress_bar: bool = True,
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_every: int | None = None,
) -> TSVGPRunResult:
    """Takes ``num_steps`` steps, from a checkpoint if there is one.

    Args:
      step: one compiled step.
      state: the state to start from.
      num_steps: how many steps, those of the checkpoint included.
      result: makes a result of a state and losses.
      usable: whether a state is finite and can be gone on from.
      diagnose: says why the step after a usable state is not.
      judge: what all losses say against the result, as a warning, or None.
      careful_start: gives a better state to start from, if the first losses ask for one.
      fingerprint: what the run is a run of, by part; a checkpoint of another is refused.
      feed: where the steps have their data from, which goes back and forth with them.
      interrupts: knows of those that Python lost.
      progress_bar: whether to show progress.
      checkpoint: file to save to, and to go on from if it exists.
      checkpoint_every: number of steps between saves.

    Returns:
      The result; after an interrupt, that of the steps so far.

    Raises:
      FitError: if the state is no longer finite or every recent step was rejected.
    """

    def made(state: TSVGPState, losses: list[Any]) -> TSVGPRunResult:
        return result(state, jnp.asarray(jax.device_get(losses)))

    losses: list[Any] = []
    is_careful = False
    if checkpoint_every is not None and checkpoint_every < 1:
        raise ValueError(f"checkpoint_every must be at least 1, got {checkpoint_every}.")
    if checkpoint is not None and not Path(checkpoint).parent.is_dir():  # not after an hour
        raise FileNotFoundError(f"There is no directory {Path(checkpoint).parent} to save to.")
    if checkpoint is not None and Path(checkpoint).exists():
        saved = read_tree(checkpoint)
        if "losses" not in saved:
            raise ValueError(
                f"'{checkpoint}' is not a checkpoint of a run: it has {sorted(saved)}. Choose "
                "another file, or load it and pass it as init_state."
            )
        _check_same_run(checkpoint, fingerprint)
        losses = list(np.asarray(saved["losses"]))
        state = read_tree(checkpoint, like=made(state, losses)).state
        meta = read_meta(checkpoint)
        is_careful = bool(meta.get("is_careful"))
        feed.seek(meta.get("batches"), len(losses))
    save = _Saving(checkpoint, fingerprint)
    report = feed.report_every(max(num_steps // 20, 1))
    every = max(num_steps // 20, 1) if checkpoint_every is None else checkpoint_every
    good = state, len(losses)
    with tqdm.tqdm(
        total=num_steps, initial=len(losses), disable=not progress_bar or jax.process_index() > 0
    ) as bar:
        try:
            while len(losses) < num_steps:
                interrupts.check()
                before, (state, loss) = state, step(state)
                losses.append(loss)
                bar.update()
                i = len(losses)
                if i <= _WATCHED and not is_careful:
                    losses[-1] = np.asarray(loss)
                    better = careful_start([float(x) for x in losses])
                    if better is not None:
                        state, losses, is_careful = better, [], True
                        good = state, 0
                        feed.rewind(0)
                        bar.reset()
                        continue
                # What is saved must be finite, or it would replace the last good fit.
                saving = checkpoint is not None and (i % every == 0 or i == num_steps)
                if saving or i % report == 0 or i == num_steps:
                    first = min(good[1], i - 1)
                    losses[first:] = [np.asarray(x) for x in jax.device_get(losses[first:])]
                    not_finite = np.sum(~np.isfinite(losses[first:]))
                    rejected = int(state.rejected) - int(good[0].rejected)
                    is_last = saving or i == num_steps
                    if not_finite > rejected or (is_last and not usable(state)):
                        feed.rewind(good[1])
                        raise _failure(step, *good, losses, made, usable, diagnose)
                    if len(losses) >= _HOPELESS and not np.isfinite(losses[-_HOPELESS:]).any():
                        raise FitError(
                            f"The last {_HOPELESS} updates were all rejected. {diagnose(state)}",
                            made(state, losses),
                        )
                    # The loss of a step says that one could go on from the state before it.
                    good = (state, i) if is_last else (before, i - 1)
                    if i >= _WATCHED or is_careful:
                        feed.forget(good[1])
                    _describe(bar, losses, first)
                if saving:
                    save(made(state, losses), is_careful, feed.place())
        except BatchesEnded:
            losses = [np.asarray(x) for x in jax.device_get(losses)]
            if not usable(state):
                feed.rewind(good[1])
                raise _failure(step, *good, losses, made, usable, diagnose) from None
            warnings.warn(
                f"The batches ended after {len(losses)} of {num_steps} updates; this is the fit so "
                "far. An iterator can be gone through once: pass a list, or an object whose "
                "__iter__ starts again.",
                stacklevel=stack_level(),
            )
        except KeyboardInterrupt:
            interrupts.taken()
            if not usable(state):
                state, losses = good[0], losses[: good[1]]
            warnings.warn(
                f"Interrupted after {len(losses)} of {num_steps} updates; this is the fit so far.",
                stacklevel=stack_level(),
            )
    if int(state.rejected):
        warnings.warn(
            f"{int(state.rejected)} updates were not finite and were rejected. A smaller site_lr "
            "or learning rate may avoid this.",
            stacklevel=stack_level(),
        )
    end = made(state, losses)
    against = judge(end.losses)
    if against is not None:
        warnings.warn(against, stacklevel=stack_level())
    return end


class _Saving:
    """Saves to a file; where that fails the fit goes on, with a warning."""

    def __init__(self, path: Any, fingerprint: Mapping[str, str]) -> None:
        self.path, self.fingerprint = path, fingerprint
        self.has_failed = False

    def __call__(self, result: TSVGPRunResult, is_careful: bool, place: Any) -> None:
        if jax.process_index():  # one of several processes writes, and all read
            return
        meta = {"run": dict(self.fingerprint), "is_careful": is_careful, "batches": place}
        try:
            write_tree(self.path, result, meta)
        except OSError as error:  # a disk that is full, a folder that is gone
            if not self.has_failed:
                warnings.warn(
                    f"The checkpoint '{self.path}' could not be written after "
                    f"{len(result.losses)} updates: {error}. The fit goes on without it and tries "
                    "again later.",
                    stacklevel=stack_level(),
                )
            self.has_failed = True


def _check_same_run(checkpoint: Any, fingerprint: Mapping[str, str]) -> None:
    """A checkpoint of other data, another model or other settings must not be gone on from."""
    saved = read_meta(checkpoint).get("run", {})
    other = [part for part, value in fingerprint.items() if saved.get(part) != value]
    if other:
        raise ValueError(
            f"'{checkpoint}' is a checkpoint of another run: {' and '.join(other)} "
            f"{'is' if len(other) == 1 else 'are'} not the same. Choose another file or remove "
            "this one, or go on from its state on purpose, with "
            "init_state=load(path, like=svi.init(...))."
        )


def _describe(bar: Any, losses: list[Any], first: int) -> None:
    recent = np.array(losses[first:])
    recent = recent[np.isfinite(recent)]
    average = recent.mean() if len(recent) else np.nan
    bar.set_postfix_str(
        f"init loss: {losses[0]:.4f}, avg loss [{first + 1}-{len(losses)}]: {average:.4f}",
        refresh=False,
    )


def _failure(
    step: Callable[[TSVGPState], tuple[TSVGPState, Array]],
    state: TSVGPState,
    done: int,
    losses: list[Any],
    result: Callable[[TSVGPState, list[Any]], TSVGPRunResult],
    usable: Callable[[TSVGPState], bool],
    diagnose: Callable[[TSVGPState], str],
) -> FitError:
    """Walks from the last state known to be usable to the last that is."""
    while done < len(losses):
        new, loss = step(state)
        was_rejected = int(new.rejected) > int(state.rejected)
        if not usable(new) or (not was_rejected and not jnp.isfinite(loss)):
            break
        state, done = new, done + 1
    message = f"The fit is no longer finite after {done} updates. {diagnose(state)}"
    return FitError(message, result(state, losses[:done]))
