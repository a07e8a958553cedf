"""What the driver and its workers say to each other: lines of JSON, through stdin and stdout.

A worker is one process with one system. It says ``{"ready": ...}`` when its imports are done, is
sent a job, answers with the seconds to its first step, and then with whatever it is asked for:
``{"steps": 5}`` gives the seconds of five iterations, ``{"evaluate": true}`` its bound and its
score on test data, ``{"fit": 100}`` a fit by the system's own loop if it has one. In between it
waits for its stdin and leaves the machine to the others.

A system is a class with ``__init__(job, data, variant)``, ``batch(X, y)`` (NumPy arrays to its
own), ``step(X, y)`` (one iteration, done when it returns), ``bound(X, y)``, ``marginals(X)`` (mean
and variance, both of shape (functions, rows), or (rows,) of one) and ``noise()``, the variance of a
Gaussian likelihood. It may have ``around()``, a context for a block of steps, and ``fit(steps, X,
y)``. Nothing here imports more than NumPy.
"""

import json
import os
import platform
import sys
import time
from contextlib import nullcontext
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import numpy as np

PACKAGES = ["numpyro-tsvgp", "numpyro", "gpflow", "tensorflow", "gpytorch", "torch"]
PACKAGES += ["gpjax", "jax", "numpy", "scipy"]
ROWS = 2000  # at once, when nothing is timed


def versions():
    """Versions of the packages that matter, of those that are installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def machine():
    """What the numbers depend on."""
    cpu = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = info.read_text().splitlines()
        cpu = next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), cpu)
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "allowed_cores": len(affinity()),
        "system": f"{platform.system()} {platform.machine()}",
        "date": time.strftime("%Y-%m-%d"),
        **versions(),
    }


def affinity():
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count()))


class Data:
    """The arrays of a job, and the minibatches that every system sees in the same order."""

    def __init__(self, job):
        names = ("X", "y", "Z", "X_test", "y_test")
        arrays = [np.load(Path(job.folder) / f"{name}.npy", mmap_mode="r") for name in names]
        self.X, self.y, self.Z, self.X_test, self.y_test = arrays
        self.Z = np.array(self.Z)
        self.size, self.rng = job.batch, np.random.default_rng(0)

    @property
    def whole(self):
        return self.size == len(self.X)

    def batch(self):
        if self.whole:
            return np.array(self.X), np.array(self.y)
        rows = np.sort(self.rng.choice(len(self.X), self.size, replace=False))
        return self.X[rows], self.y[rows]


def log_density(job, mean, variance, y, noise):
    """log E[p(y | f)] at each row under Gaussian marginals, alike for all systems."""
    mean, variance = (np.atleast_2d(np.asarray(x, float)) for x in (mean, variance))
    if job.likelihood == "gaussian":
        total = variance[0] + noise
        return -0.5 * (np.log(2 * np.pi * total) + (y - mean[0]) ** 2 / total)
    if job.likelihood == "bernoulli":
        nodes, weights = np.polynomial.hermite_e.hermegauss(30)
        f = mean[0] + np.sqrt(variance[0]) * nodes[:, None]
        p = 1.0 / (1.0 + np.exp(-np.where(y == 1, f, -f)))
        return np.log(weights @ p / weights.sum())
    draws = np.random.default_rng(0).standard_normal((256, job.functions, 1))
    f = mean + np.sqrt(variance) * draws
    f = f - f.max(1, keepdims=True)
    p = np.exp(f[:, y.astype(int), np.arange(len(y))]) / np.exp(f).sum(1)
    return np.log(p.mean(0))


def evaluate(job, data, system):
    """The bound on the training data and the mean negative log density of the test data."""
    n = min(len(data.X), 10_000) // ROWS * ROWS or min(len(data.X), ROWS)
    parts = [slice(i, min(i + ROWS, n)) for i in range(0, n, ROWS)]
    bounds = [system.bound(*system.batch(data.X[i], data.y[i])) for i in parts]
    scores = []
    for i in range(0, len(data.X_test), ROWS):
        X, y = np.array(data.X_test[i : i + ROWS]), np.array(data.y_test[i : i + ROWS])
        scores.append(log_density(job, *system.marginals(X), y, system.noise()))
    # Each part is scaled to all rows, so that their mean is the bound on all rows.
    return {"bound": float(np.mean(bounds)), "nlpd": float(-np.concatenate(scores).mean())}


def serve(make):
    """Answers the driver until it closes the pipe. ``make(job, data, variant)`` gives a system."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is not an answer

    def reply(**message):
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    reply(ready=True, versions=versions())
    system = data = job = fixed = None

    def steps(number):
        seconds = []
        with getattr(system, "around", nullcontext)():
            for _ in range(number):
                batch = fixed or data.batch()
                start = time.perf_counter()
                system.step(*(batch if fixed else system.batch(*batch)))
                seconds.append(time.perf_counter() - start)
        return seconds

    for line in sys.stdin:
        message = json.loads(line)
        try:
            if "job" in message:
                job = SimpleNamespace(**message["job"])
                data = Data(job)
                start = time.perf_counter()
                system = make(job, data, message["variant"])
                fixed = system.batch(*data.batch()) if data.whole else None
                steps(message.get("first", 1))
                seconds = time.perf_counter() - start
                steps(message.get("warm", 0))  # a system may compile once more
                reply(first_step=seconds)
            elif "steps" in message:
                reply(seconds=steps(message["steps"]))
            elif "fit" in message:
                if hasattr(system, "fit"):
                    system.fit(message["fit"], *fixed)
                else:
                    steps(message["fit"])
                reply(fitted=True)
            elif "evaluate" in message:
                reply(**evaluate(job, data, system))
        except Exception as error:
            reply(error=f"{type(error).__name__}: {error}"[:500])
