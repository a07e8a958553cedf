"""What the scripts of the paper's experiments share: options, methods, data, results."""

import argparse
import csv
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import matplotlib
import numpy as np

from numpyro_tsvgp import QSVGP, TSVGP, AutoDualGaussian, AutoMomentGaussian

matplotlib.use("Agg")
import matplotlib.pyplot as plt

jax.config.update("jax_enable_x64", True)

ROOT = Path(__file__).resolve().parents[2]


class Method(NamedTuple):
    """One of the methods compared: its name in tables and in pictures, and its guide."""

    key: str
    label: str
    colour: str
    guide: Callable[..., Any]
    driver: Callable[..., Any]

    def make(
        self, model: Any, Z: Any, optim: Any, *, learn_inducing: bool = True, **more: Any
    ) -> Any:
        guide = self.guide(model, Z, learn_inducing=learn_inducing)
        return self.driver(model, guide, optim, **more)


def _unwhitened(model: Any, Z: Any, **more: Any) -> AutoMomentGaussian:
    return AutoMomentGaussian(model, Z, whiten=False, **more)


def _adam(
    model: Any, guide: Any, optim: Any, *, e_steps: int = 1, site_lr: Any = None, **more: Any
):
    del e_steps, site_lr  # there is no E-step
    return QSVGP(model, guide, optim, natural_gradients=False, **more)


T = Method("t_svgp", "t-SVGP", "tab:blue", AutoDualGaussian, TSVGP)
WHITENED = Method("q_svgp_whitened", "q-SVGP (whitened)", "tab:orange", AutoMomentGaussian, QSVGP)
UNWHITENED = Method("q_svgp", "q-SVGP", "tab:green", _unwhitened, QSVGP)
ADAM = Method("q_svgp_adam", "q-SVGP (whitened, Adam)", "tab:red", AutoMomentGaussian, _adam)


class Results:
    """Where a script writes, and what it has been told: ``--quick``, ``--data``, ``--output``."""

    def __init__(self, name: str, description: str | None, **numbers: int) -> None:
        parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
        parser.add_argument("--quick", action="store_true", help="a few steps only, for tests")
        parser.add_argument(
            "--data", type=Path, default=ROOT / "examples" / "data", help="directory of the data"
        )
        parser.add_argument(
            "--output", type=Path, help="directory for tables and pictures, instead of docs/"
        )
        for option, default in numbers.items():
            parser.add_argument(f"--{option}", type=int, default=default)
        self.args = parser.parse_args()
        self.name = name
        docs = ROOT / "docs"
        self.tables = self.args.output or docs / "paper"
        self.pictures = self.args.output or docs / "images"

    @property
    def quick(self) -> bool:
        return self.args.quick

    def table(self, columns: dict[str, Iterable[Any]], name: str | None = None) -> None:
        """Writes columns as a CSV file."""
        path = self.tables / f"{name or self.name}.csv"
        with path.open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(columns)
            for row in zip(*columns.values(), strict=True):
                writer.writerow([f"{x:.8g}" if isinstance(x, float) else x for x in row])
        print(f"wrote {path}")

    def picture(self, figure: Any, name: str | None = None) -> None:
        path = self.pictures / f"paper_{name or self.name}.png"
        figure.savefig(path, dpi=110)
        plt.close(figure)
        print(f"wrote {path}")


def published(name: str) -> np.ndarray:
    """Numbers of the paper's figures and tables, by column name."""
    path = ROOT / "docs" / "paper" / f"published_{name}.csv"
    return np.genfromtxt(path, delimiter=",", names=True)


def load(data: Path, name: str, header: bool = True) -> np.ndarray:
    """A CSV file of numbers."""
    return np.loadtxt(data / name, delimiter=",", skiprows=int(header), ndmin=2)


def standardise(train: np.ndarray, *others: np.ndarray) -> Sequence[np.ndarray]:
    """Columns of mean zero and standard deviation one on the first array; constant ones are 0."""
    mean, sd = train.mean(0), train.std(0)
    return [(x - mean) / np.where(sd > 0, sd, 1.0) for x in (train, *others)]
