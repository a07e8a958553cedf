"""How entries are made, fitted and compared."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
from answers import Moments, slice_sample
from numpyro.infer import MCMC, NUTS

from numpyro_tsvgp import TSVGP, AutoDualGaussian, collapse
from numpyro_tsvgp.gaussian.linalg import blas_threads

STORED = Path(__file__).parents[1] / "data" / "corpus.json"
Answer = dict[str, Moments]


@dataclass(frozen=True)
class Entry:
    """One model.

    Attributes:
      run: fits it; gives moments by name.
      refused: a pattern of the words it is refused with, or None if it is accepted.
      answer: moments by other means; None where being warned is all that is asked for.
      how: how the answer was got.
      mean: how far means may be off, in posterior standard deviations.
      sd: how far standard deviations may be off, relative; None where they are not asked for.
      warns: a pattern of a warning that must come; None if there must be none.
      stored: whether the answer is read from the file of stored ones.
    """

    run: Callable[[], Answer]
    refused: str | None = None
    answer: Callable[[], Answer] | None = None
    how: str = ""
    mean: float = 0.15
    sd: float | None = 0.1
    warns: str | None = None
    stored: bool = False


CORPUS: dict[str, Entry] = {}


def reference(name: str) -> Answer:
    """The answer of an entry, computed anew, however long it takes."""
    answer = CORPUS[name].answer
    assert answer is not None
    return answer()


def expected(name: str) -> Answer:
    """The answer of an entry: computed, or as it was stored."""
    if not CORPUS[name].stored:
        return reference(name)
    found = stored_answers()[name]
    keys = [key.removesuffix(" mean") for key in found if key.endswith(" mean")]
    return {k: Moments(*(np.array(found[f"{k} {part}"]) for part in Moments._fields)) for k in keys}


@cache
def stored_answers() -> dict[str, Any]:
    """What the file has, by entry."""
    return json.loads(STORED.read_text())


# ---- how entries are made --------------------------------------------------------------------


def fit(model, *args, steps=50, optim=None, guide=None, init_params=None, key=0, **options):
    """A fit: by default of one site for each data point, at given hyperparameters."""
    svi = TSVGP(model, AutoDualGaussian(model, **(guide or {})), optim, **options)
    return svi.run(jax.random.key(key), steps, *args, init_params=init_params, progress_bar=False)


def marginals(result, *args) -> Answer:
    return {
        name: Moments(np.asarray(q.mean), np.sqrt(np.asarray(q.variance)))
        for name, q in result.fit.marginals(*args).items()
    }


def hyperparameters(result, count=4000) -> Answer:
    """Moments of variational hyperparameters, by draws from their guide."""
    made = result.fit.hyper_guide
    keys = jax.random.split(jax.random.key(3), count)
    draw = jax.jit(jax.vmap(lambda key: made.draw(key, result.fit.params, result.fit.data)[0]))
    return {k: Moments(np.mean(v, 0), np.std(v, 0)) for k, v in draw(keys).items()}


def points(*names: str):
    """Values of parameters, which have no spread."""

    def found(result) -> Answer:
        values = {**result.params, **result.fit.hyper}
        return {k: Moments(np.asarray(values[k]), None) for k in names}

    return found


def nuts_on_collapse(result, *args, draws=600, transform=None) -> Answer:
    """Hyperparameters and GPs by NUTS on the collapsed model."""
    collapsed = collapse(result.fit)
    mcmc = MCMC(NUTS(collapsed), num_warmup=400, num_samples=draws, progress_bar=False)
    with blas_threads():
        mcmc.run(jax.random.key(5), *args)
    samples = mcmc.get_samples()
    out = {k: Moments(np.mean(v, 0), np.std(v, 0)) for k, v in (transform or dict)(samples).items()}
    for name, q in collapsed.marginals(samples).items():
        out[name] = Moments(np.asarray(q.mean), np.sqrt(np.asarray(q.variance)))
    return out


def _name(model: Callable) -> str:
    return model.__name__.strip("_").replace("_", " ")


def accepted(
    *args, answer, how, mean=0.15, sd=0.1, warns=None, stored=False, found=marginals, **settings
):
    """Registers a model that is fitted and compared."""

    def register(model):
        entry = Entry(
            lambda: found(fit(model, *args, **settings)), None, answer, how, mean, sd, warns, stored
        )
        assert _name(model) not in CORPUS
        CORPUS[_name(model)] = entry
        return model

    return register


def exactly(*args, answer, how="Gaussian algebra", **settings):
    """Registers a model whose fit is exact: one E-step of rate 1 on a Gaussian likelihood."""
    exact = {"site_lr": 1.0, "steps": 2, "mean": 1e-4, "sd": 1e-4}
    return accepted(*args, answer=answer, how=how, **{**exact, **settings})


def sampled(*args, prior, log_likelihood, draws=3000, **settings):
    """Registers a model whose answer is by elliptical slice sampling."""

    def answer() -> Answer:
        found = slice_sample(prior, log_likelihood, steps=draws)
        print(f"  standard error of means: {found.error:.3f} posterior standard deviations")
        sd = np.sqrt(np.diag(found.covariance))
        return {name: Moments(found.mean[b], sd[b]) for name, b in prior.blocks.items()}

    close = {"mean": 0.05, "sd": 0.06, **settings}
    return accepted(*args, answer=answer, how="elliptical slice sampling", stored=True, **close)


def refused(pattern: str, *args, **settings):
    """Registers a model that must not be fitted."""

    def register(model):
        CORPUS[_name(model)] = Entry(
            lambda: marginals(fit(model, *args, **settings)), refused=pattern
        )
        return model

    return register


def scenario(**fields):
    """Registers a function that does more than one fit and gives moments."""

    def register(run):
        CORPUS[_name(run)] = Entry(run, **fields)
        return run

    return register


def together(parts: Answer, name: str) -> Answer:
    """Moments of several vectors as those of one GP site with several functions."""
    return {
        name: Moments(*(np.stack([getattr(m, f) for m in parts.values()]) for f in ("mean", "sd")))
    }


class Remembered:
    """What a run found out, for an answer that is about that run."""

    def __init__(self):
        self.value: Any = None
