"""This library beside GPflow, GPyTorch and GPJax: seconds for the same work, in one run.

    python examples/benchmarks/compare.py --output results/
    python examples/benchmarks/compare.py --jobs mnist --mnist mnist.npz --output results/
    python examples/benchmarks/compare.py --jobs cold-start --output results/

Each system has an environment of its own, made from PyPI on first use and kept in
``--environments``, and runs in a process of its own. All of them take their turns, a short block of
iterations each, while the others wait. Times are medians over iterations after compilation.

- ``mnist``: ten latent functions, one Matern-5/2 kernel, softmax, d = 784, m = 100, batches of 200
  of 60,000 rows, one E-step (natural gradient) and one M-step (Adam);
- ``mnist odd/even``: the same with one function and a Bernoulli likelihood;
- ``em``, ``em 1000``: binary classification, n = 10,000 or 1,000, d = 8, m = 50, 8 E-steps and 15
  M-steps on all rows;
- ``em minibatch``: the same with batches of 200 of 10,000 rows;
- ``regression 256``, ``regression 1024``: Gaussian likelihood, d = 8, batches of 1,000 of 36,000
  rows, m = 256 or 1024, one E-step and one M-step;
- ``cold-start``: from the start of a process to a model of the banana data after 100 iterations.

Inducing inputs, kernel and noise are learned in all of them; they start alike, with equal rates.
Data are random unless ``--mnist`` (an .npz file with X and y, 60,000 rows to learn from first) or
``--kin40k`` (a .csv.gz file, the target last) give real ones; with the first, the score on test
data is followed too. JAX calls a BLAS whose threads get into XLA's way: systems on JAX run as they
come and with one BLAS thread.

Writes ``compare.csv``, ``compare_curves.csv`` (scores on the way), ``compare.json`` (with the
machine and the versions) and pictures. ``--redraw`` makes the pictures anew from the CSV files in
``--output`` and measures nothing.
"""

import argparse
import csv
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
WORKERS = HERE / "workers"
sys.path.insert(0, str(WORKERS))

from protocol import affinity, machine  # noqa: E402

OURS = "numpyro_tsvgp"
ENVIRONMENTS = {
    "ours": ["-e", str(ROOT), "matplotlib"],
    "gpflow": ["gpflow==2.11.*", "tensorflow==2.21.*", "tf-keras==2.21.*", "setuptools<81"],
    "gpytorch": ["torch==2.13.0", "gpytorch==1.15.*", "numpy"],
    "gpjax": ["gpjax==1.0.*"],
}
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}
SYSTEMS = {  # environment, worker, variant, variables
    OURS: ("ours", "ours.py", "t-SVGP", {}),
    f"{OURS} (one BLAS thread)": ("ours", "ours.py", "t-SVGP", ONE_THREAD),
    f"{OURS} q-SVGP": ("ours", "ours.py", "q-SVGP", {}),
    "GPflow whitened": ("gpflow", "gpflow_worker.py", "whitened", {}),
    "GPflow unwhitened": ("gpflow", "gpflow_worker.py", "unwhitened", {}),
    "GPyTorch alternating": ("gpytorch", "gpytorch_worker.py", "alternating", {}),
    "GPyTorch joint": ("gpytorch", "gpytorch_worker.py", "joint", {}),
    "GPJax dual": ("gpjax", "gpjax_worker.py", "dual", {}),
    "GPJax dual (one BLAS thread)": ("gpjax", "gpjax_worker.py", "dual", ONE_THREAD),
    "GPJax whitened": ("gpjax", "gpjax_worker.py", "whitened", {}),
    "GPJax whitened (one BLAS thread)": ("gpjax", "gpjax_worker.py", "whitened", ONE_THREAD),
}
SIZES = ("rows", "batch", "d", "m", "functions", "e_steps", "m_steps")
SIZES += ("likelihood", "lengthscale", "e_rate", "m_rate")
JOBS = {
    "mnist": (60_000, 200, 784, 100, 10, 1, 1, "softmax", 1.0, 0.03, 0.02),
    "mnist odd/even": (60_000, 200, 784, 100, 1, 1, 1, "bernoulli", 1.0, 0.03, 0.02),
    "em": (10_000, 10_000, 8, 50, 1, 8, 15, "bernoulli", 8**0.5, 0.5, 0.02),
    "em 1000": (1_000, 1_000, 8, 50, 1, 8, 15, "bernoulli", 8**0.5, 0.5, 0.02),
    "em minibatch": (10_000, 200, 8, 50, 1, 8, 15, "bernoulli", 8**0.5, 0.1, 0.01),
    "regression 256": (36_000, 1_000, 8, 256, 1, 1, 1, "gaussian", 8**0.5, 0.1, 0.01),
    "regression 1024": (36_000, 1_000, 8, 1024, 1, 1, 1, "gaussian", 8**0.5, 0.1, 0.01),
    "cold-start": (400, 400, 2, 25, 1, 1, 1, "bernoulli", 1.0, 0.5, 0.05),
}
QUICK = {"em 1000": (100, 100, 2, 5, 1, 2, 2, "bernoulli", 1.0, 0.5, 0.02)}
BLOCK = 0.5  # seconds of one turn
WARM = 2  # iterations after the first that are not counted
PAUSE = 0.1  # seconds between turns, in which the last one's threads come to rest


def describe(name, sizes, precision, folder):
    """The job as it is sent to a worker."""
    job = dict(zip(SIZES, sizes, strict=True))
    return job | {
        "name": name,
        "variance": 1.0,
        "noise": 0.1,
        "samples": 100,  # of the functions under a softmax, where a system draws them
        "precision": precision,
        "folder": str(folder),
    }


def can(system, job):
    """Whether a system has what a job needs."""
    if system.startswith("GPJax"):
        return job["functions"] == 1
    if "joint" in system:  # one backward pass for both: as many E-steps as M-steps
        return job["e_steps"] == job["m_steps"]
    return True


# ---- data ------------------------------------------------------------------------------------


def random_data(job, rng):
    """Noisy labels of smooth functions of inputs that suit the first lengthscale.

    Of wide inputs there are fewer rows than the job says; its batches do not notice.
    """
    tests, d, p = 500, job["d"], job["functions"]
    n = min(job["rows"], 10_000) if d > 100 else job["rows"]
    X = rng.standard_normal((n + tests, d)) * job["lengthscale"] / np.sqrt(d)
    directions = rng.standard_normal((d, 20)) / job["lengthscale"]
    features = np.cos(1.5 * X @ directions + rng.uniform(0, 6, 20))
    f = features @ rng.standard_normal((20, p))
    noise = 0.3 * f.std() * rng.standard_normal(f.shape)
    y = {"softmax": np.argmax, "bernoulli": lambda f, _: f[:, 0] > np.median(f)}.get(
        job["likelihood"], lambda f, _: (f[:, 0] - f.mean()) / f.std()
    )(f + noise, 1)
    return X, y.astype(float), tests


def real_data(job, args):
    """MNIST, kin40k or banana, with the number of test rows at the end; None if not given."""
    name = job["name"]
    if name.startswith("mnist") and args.mnist:
        with np.load(args.mnist) as file:
            X, y = file["X"].reshape(len(file["X"]), -1)[:62_000] / 255.0, file["y"][:62_000]
        return X, (y.astype(int) % 2 if "odd" in name else y).astype(float), 2_000
    if name.startswith("regression") and args.kin40k:
        table = np.loadtxt(args.kin40k, delimiter=",")
        table = table[np.random.default_rng(0).permutation(len(table))]
        table = (table - table[:-4000].mean(0)) / table[:-4000].std(0)
        return table[:, :-1], table[:, -1], 4_000
    if name == "cold-start":
        table = np.loadtxt(ROOT / "examples/data/banana.csv", delimiter=",", skiprows=1)
        return np.r_[table, table][:, :2], np.r_[table, table][:, 2], len(table)
    return None


def write_data(job, args):
    """The arrays of a job as files in its folder."""
    rng = np.random.default_rng(0)
    X, y, tests = real_data(job, args) or random_data(job, rng)
    train = len(X) - tests
    Z = X[rng.choice(train, job["m"], replace=False)]
    arrays = {"X": X[:train], "X_test": X[train:], "Z": Z, "y": y[:train], "y_test": y[train:]}
    whole_numbers = job["likelihood"] == "softmax"
    Path(job["folder"]).mkdir(parents=True, exist_ok=True)
    for name, array in arrays.items():
        dtype = np.int32 if whole_numbers and name.startswith("y") else job["precision"]
        np.save(Path(job["folder"]) / f"{name}.npy", np.ascontiguousarray(array, dtype))


# ---- environments and processes --------------------------------------------------------------


def environment(name, folder):
    """The interpreter of an environment, which is made if it is not there as wanted."""
    place, wanted = folder / name, "\n".join(ENVIRONMENTS[name])
    done = place / "requirements.txt"
    windows = os.name == "nt"
    python = place / ("Scripts/python.exe" if windows else "bin/python")
    if not done.exists() or done.read_text() != wanted:
        print(f"making the environment of {name} in {place}", flush=True)
        shutil.rmtree(place, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
        # One by one, so that a pinned version is there before another package asks for it.
        packages = ENVIRONMENTS[name]
        groups = [packages] if "-e" in packages else [[p] for p in packages[:1]] + [packages]
        for group in groups:
            subprocess.run([str(python), "-m", "pip", "install", "-q", *group], check=True)
        done.write_text(wanted)
    return str(python)


def interpreters(systems, args):
    """Interpreters by environment; one that cannot be made is reported and left out."""
    found = {}
    for name in dict.fromkeys(SYSTEMS[system][0] for system in systems):
        if args.quick:
            found[name] = sys.executable
            continue
        try:
            found[name] = environment(name, args.environments)
        except (subprocess.CalledProcessError, OSError) as error:
            print(f"{name} is left out, its environment cannot be made: {error}", flush=True)
    return found


class Failed(RuntimeError):
    """A worker answered with an error, or not at all."""


class Worker:
    """A process with one system, spoken to in lines of JSON."""

    def __init__(self, system, python):
        _, script, self.variant, variables = SYSTEMS[system]
        self.system = system
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        plain = {key: os.environ[key] for key in os.environ if key not in ONE_THREAD}
        quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
        self.started = time.perf_counter()
        self.process = subprocess.Popen(
            [python, "-W", "ignore", str(WORKERS / script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env=plain | quiet | variables,
        )
        self.versions = self.hear()["versions"]
        self.import_seconds = time.perf_counter() - self.started
        self.seconds, self.curve = [], []

    def hear(self):
        line = self.process.stdout.readline()
        if not line:
            self.log.seek(0)
            raise Failed("the process ended: " + self.log.read()[-500:])
        answer = json.loads(line)
        if "error" in answer:
            raise Failed(answer["error"])
        return answer

    def ask(self, **message):
        try:
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise Failed("the process ended") from None
        return self.hear()

    def prepare(self, job):
        self.first_step = self.ask(job=job, variant=self.variant, warm=WARM)["first_step"]

    def turn(self, block):
        """As many iterations as fit into a block, to judge by those before."""
        number = 1 if not self.seconds else max(1, int(block / np.median(self.seconds[-20:])))
        self.seconds += self.ask(steps=number)["seconds"]

    def evaluate(self):
        found = self.ask(evaluate=True)
        self.curve.append(
            (len(self.seconds) + 1 + WARM, sum(self.seconds), found["nlpd"], found["bound"])
        )
        return found

    def close(self):
        self.process.stdin.close()
        self.process.stdout.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.log.close()


# ---- measurements ----------------------------------------------------------------------------


def start(systems, pythons, job):
    """The workers that could be brought to their first step, one after the other."""
    workers = []
    for system in systems:
        if SYSTEMS[system][0] not in pythons or not can(system, job):
            continue
        worker = None
        try:
            worker = Worker(system, pythons[SYSTEMS[system][0]])
            worker.prepare(job)
            workers.append(worker)
        except Failed as error:
            print(f"{job['name']}, {job['precision']}: {system} failed: {error}", flush=True)
            if worker is not None:
                worker.close()
    return workers


def measure(job, systems, pythons, seconds, follow):
    """Turns of all systems until each has had its seconds, and a row of numbers for each."""
    workers = start(systems, pythons, job)
    block = min(BLOCK, seconds / 30) if follow else min(BLOCK, seconds)
    failed = {}

    def attempt(worker, action):
        try:
            action()
        except Failed as error:
            print(f"{job['name']}: {worker.system} failed: {error}", flush=True)
            failed[worker.system] = str(error)

    def live():
        return [worker for worker in workers if worker.system not in failed]

    while waiting := [w for w in live() if sum(w.seconds) < seconds or len(w.seconds) < 3]:
        for worker in waiting:
            time.sleep(PAUSE)
            attempt(worker, lambda w=worker: w.turn(block))
        if follow:
            for worker in live():
                last = worker.curve[-1][1] if worker.curve else -np.inf
                if sum(worker.seconds) - last > seconds / 20:
                    attempt(worker, worker.evaluate)
    for worker in live():
        if not worker.curve or worker.curve[-1][1] < sum(worker.seconds):
            attempt(worker, worker.evaluate)
    rows = [
        {
            "system": worker.system,
            "median_ms": 1e3 * float(np.median(worker.seconds)),
            "best_ms": 1e3 * min(worker.seconds),
            "iterations": len(worker.seconds) + 1 + WARM,
            "first_step_s": worker.first_step,
            "import_s": worker.import_seconds,
            "bound": worker.curve[-1][3] if worker.curve else None,
            "nlpd": worker.curve[-1][2] if worker.curve else None,
            "failed": failed.get(worker.system, ""),
            "curve": worker.curve if follow else [],
            "versions": worker.versions,
        }
        for worker in workers
        if worker.seconds
    ]
    for worker in workers:
        worker.close()
    return rows


def cold_start(job, systems, pythons, repeats):
    """Seconds from the start of a process to a fitted model, a new process each time, in turns."""
    found = {system: [] for system in systems if SYSTEMS[system][0] in pythons}
    for _ in range(repeats):
        for system, runs in found.items():
            worker = None
            try:
                worker = Worker(system, pythons[SYSTEMS[system][0]])
                worker.ask(job=job, variant=worker.variant, first=0)
                worker.ask(fit=100)
                seconds = time.perf_counter() - worker.started
                runs.append((seconds, worker.import_seconds, worker.evaluate(), worker.versions))
            except Failed as error:
                print(f"cold start: {system} failed: {error}", flush=True)
            if worker is not None:
                worker.close()
    rows = []
    for system, runs in found.items():
        if runs:
            seconds, imports, scores, packages = zip(*runs, strict=True)
            rows.append(
                {
                    "system": system,
                    "median_ms": 1e3 * float(np.median(seconds)),
                    "best_ms": 1e3 * min(seconds),
                    "iterations": 100,
                    "first_step_s": None,
                    "import_s": float(np.median(imports)),
                    "failed": "",
                    "curve": [],
                    "versions": packages[0],
                }
                | scores[0]
            )
    return rows


def with_ratios(rows):
    """How many times as long as ours, and as the fastest system that is not ours."""
    ours = next((row["median_ms"] for row in rows if row["system"].startswith(OURS)), None)
    peers = [row["median_ms"] for row in rows if not row["system"].startswith(OURS)]
    for row in rows:
        row["to_ours"] = row["median_ms"] / ours if ours else None
        row["to_fastest_peer"] = row["median_ms"] / min(peers) if peers else None
    return rows


# ---- output ----------------------------------------------------------------------------------

COLUMNS = ["job", "precision", "cores", "system", "median_ms", "best_ms"]
COLUMNS += ["to_ours", "to_fastest_peer", "iterations"]
COLUMNS += ["first_step_s", "import_s", "bound", "nlpd", "failed"]
CURVE = ["iteration", "seconds", "nlpd", "bound"]


def write(rows, output):
    """Numbers as CSV and, with everything that belongs to them, as JSON."""
    with open(output / "compare.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(
            {k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()} for row in rows
        )
    with open(output / "compare_curves.csv", "w", newline="") as file:
        curves = csv.writer(file)
        curves.writerow([*COLUMNS[:4], *CURVE])
        for row in rows:
            for point in row["curve"]:
                curves.writerow([*(row[k] for k in COLUMNS[:4]), *(f"{v:.6g}" for v in point)])
    (output / "compare.json").write_text(
        json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n"
    )


def read(folder):
    """Rows with what pictures need, from the CSV files of an earlier run."""
    with open(folder / "compare.csv", newline="") as file:
        rows = [row | {"median_ms": float(row["median_ms"])} for row in csv.DictReader(file)]
    curves = {}
    if (folder / "compare_curves.csv").exists():
        with open(folder / "compare_curves.csv", newline="") as file:
            for row in csv.DictReader(file):
                points = curves.setdefault(tuple(row[k] for k in COLUMNS[:4]), [])
                points.append([float(row[k]) for k in CURVE])
    return [row | {"curve": curves.get(tuple(row[k] for k in COLUMNS[:4]), [])} for row in rows]


def show(row):
    ratio = "" if row["to_ours"] is None else f"{row['to_ours']:6.2f} x ours"
    first = "" if row["first_step_s"] is None else f"first step {row['first_step_s']:5.1f} s"
    quality = "" if row["nlpd"] is None else f"bound {row['bound']:.1f} nlpd {row['nlpd']:.3f}"
    print(
        f"{row['job']:15} {row['precision']} {row['cores']} cores  {row['system']:34} "
        f"median {row['median_ms']:8.1f} ms  best {row['best_ms']:8.1f} ms {ratio}  {first}  "
        f"{quality} after {row['iterations']}",
        flush=True,
    )


TITLES = {
    "mnist": "MNIST: ten functions, softmax, minibatches",
    "mnist odd/even": "MNIST odd/even: one function, minibatches",
    "em": "em: classification, 10,000 rows, 8 E- and 15 M-steps",
    "em 1000": "em: the same with 1,000 rows",
    "em minibatch": "em minibatch: batches of 200 rows",
    "regression 256": "regression, 256 inducing inputs",
    "regression 1024": "regression, 1024 inducing inputs",
    "cold-start": "cold start: import, compile, 100 iterations",
}


def plot(rows, output):
    """Bars for each job, and the scores by seconds where they were followed."""
    try:
        import matplotlib
    except ImportError:
        print("no pictures: matplotlib is not installed")
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    settings = list(dict.fromkeys((row["precision"], row["cores"]) for row in rows))
    jobs = list(dict.fromkeys(row["job"] for row in rows))
    colours = {"numpyro": "C0", "GPflow": "C1", "GPyTorch": "C2", "GPJax": "C3"}

    def colour(system):
        return next(value for key, value in colours.items() if system.startswith(key))

    for precision, cores in settings:
        groups = {
            job: [
                row
                for row in rows
                if (row["job"], row["precision"], row["cores"]) == (job, precision, cores)
            ]
            for job in jobs
        }
        groups = {job: group for job, group in groups.items() if group}
        columns = min(2, len(groups))
        lines = -(-len(groups) // columns)
        fig, axes = plt.subplots(
            lines,
            columns,
            figsize=(7.5 * columns, 3.2 * lines),
            layout="constrained",
            squeeze=False,
        )
        for ax in axes.flat[len(groups) :]:
            ax.axis("off")
        for ax, (job, group) in zip(axes.flat, groups.items(), strict=False):
            names = [row["system"] for row in group]
            scale = 1e-3 if job == "cold-start" else 1.0
            values = [scale * row["median_ms"] for row in group]
            bars = ax.barh(names, values, color=[colour(name) for name in names])
            labels = [f" {value:,.0f}" if value >= 100 else f" {value:.3g}" for value in values]
            ax.bar_label(bars, labels, fontsize=8)
            ax.set_title(TITLES.get(job, job))
            ax.set_xlabel("seconds" if job == "cold-start" else "milliseconds an iteration")
            ax.set_xlim(0, max(values) * 1.15)
            ax.invert_yaxis()
        fig.suptitle(f"time of one iteration, less is better ({precision}, cores: {cores})")
        fig.savefig(output / f"compare_{precision}_{cores}.png", dpi=120)
        plt.close(fig)
    for job, precision, cores in dict.fromkeys(
        (row["job"], row["precision"], row["cores"]) for row in rows if row["curve"]
    ):
        fig, ax = plt.subplots(figsize=(7, 4.5), layout="constrained")
        for row in rows:
            of = (row["job"], row["precision"], row["cores"])
            if of == (job, precision, cores) and row["curve"]:
                _, seconds, nlpd, _ = np.array(row["curve"]).T
                style = ":" if "one BLAS" in row["system"] else "-"
                style = "--" if "q-SVGP" in row["system"] else style
                look = {"color": colour(row["system"]), "linestyle": style, "marker": "."}
                ax.plot(seconds, nlpd, label=row["system"], **look)
        ax.set(xscale="log", xlabel="seconds, without compilation", ylabel="NLPD on test data")
        ax.set_title(f"{TITLES.get(job, job)} ({precision}, cores: {cores})")
        ax.legend(fontsize=8)
        name = f"nlpd_{job}_{precision}_{cores}".replace(" ", "_").replace("/", "_")
        fig.savefig(output / f"{name}.png", dpi=120)
        plt.close(fig)


def main():
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])

    def some(text):
        return [part.strip() for part in text.split(",")]

    parser.add_argument("--output", type=Path, default=Path("results"), help="a folder")
    parser.add_argument(
        "--environments", type=Path, default=cache / "numpyro_tsvgp-benchmarks", help="a folder"
    )
    parser.add_argument("--systems", type=some, help="names or beginnings of names, with commas")
    parser.add_argument("--jobs", type=some, help=f"of {', '.join(JOBS)}")
    parser.add_argument("--precisions", type=some, default=["float64", "float32"])
    parser.add_argument("--cores", type=some, default=["1", "2"], help="numbers of cores")
    parser.add_argument("--seconds", type=float, default=10.0, help="for each system and job")
    parser.add_argument("--repeats", type=int, default=3, help="of a cold start")
    parser.add_argument("--mnist", type=Path, help="an .npz file with X and y")
    parser.add_argument("--kin40k", type=Path, help="a .csv or .csv.gz file")
    parser.add_argument("--redraw", action="store_true", help="pictures from the CSV files alone")
    parser.add_argument("--quick", action="store_true", help="tiny, ours alone, for tests")
    args = parser.parse_args()
    if args.redraw:
        plot(read(args.output), args.output)
        return
    jobs = QUICK if args.quick else JOBS
    names = list(jobs) if args.quick or not args.jobs else args.jobs
    if unknown := set(names) - set(jobs):
        parser.error(f"no such jobs: {sorted(unknown)}")
    systems = [s for s in SYSTEMS if not args.systems or any(map(s.startswith, args.systems))]
    if args.quick:
        systems, args.precisions, args.cores, args.seconds = [OURS], ["float64"], ["1"], 0.1
    args.output.mkdir(parents=True, exist_ok=True)
    args.environments.mkdir(parents=True, exist_ok=True)
    pythons = interpreters(systems, args)
    allowed, rows = affinity(), []
    pins = hasattr(os, "sched_setaffinity")  # processes started later inherit it
    numbers = [int(cores) for cores in args.cores if int(cores) <= len(allowed)]
    if not pins or not numbers:
        numbers = [len(allowed)]
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            for precision in args.precisions:
                place = Path(folder) / f"{name}-{precision}".replace("/", "-")
                job = describe(name, jobs[name], precision, place)
                write_data(job, args)
                for cores in numbers:
                    if pins:
                        os.sched_setaffinity(0, allowed[:cores])
                    if name == "cold-start":
                        found = cold_start(job, systems, pythons, args.repeats)
                    else:
                        follow = bool(args.mnist) and name.startswith("mnist")
                        found = measure(job, systems, pythons, args.seconds, follow)
                    for row in with_ratios(found):
                        row |= {"job": name, "precision": precision, "cores": cores}
                        show(row)
                        rows.append(row)
                    if pins:
                        os.sched_setaffinity(0, allowed)
                    write(rows, args.output)
                shutil.rmtree(place)
    plot(rows, args.output)


if __name__ == "__main__":
    main()
