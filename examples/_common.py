"""What the example scripts share: their options, their data, and how they keep a picture."""

import argparse
from pathlib import Path
from typing import Any

import numpy as np

DATA = Path(__file__).parent / "data"


def options(name: str, description: str | None, **more: Any) -> argparse.Namespace:
    """``--quick``, ``--output`` and what else a script asks for (option name to help text)."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few steps only, for tests")
    parser.add_argument("--output", type=Path, default=Path(f"{name}.png"), help="the picture")
    for option, text in more.items():
        parser.add_argument(f"--{option}", type=Path, help=text)
    # In a notebook the command line is that of the kernel, which is not for us.
    return parser.parse_known_args()[0]


def load(name: str) -> np.ndarray:
    """The columns of a file in ``examples/data``, one row each."""
    return np.loadtxt(DATA / name, delimiter=",", skiprows=1, ndmin=2).T


def band(ax: Any, x: Any, mean: Any, sd: Any, color: str = "C0", label: str | None = None) -> None:
    """A mean with two standard deviations on either side, which the legend says."""
    ax.fill_between(x, mean - 2 * sd, mean + 2 * sd, color=color, alpha=0.2, linewidth=0)
    ax.plot(x, mean, color=color, label=f"{label or 'mean'} (band: ± 2 sd)")


def save(figure: Any, args: argparse.Namespace) -> None:
    """Keeps the picture. That of a quick run says so, lest it be taken for a result."""
    if args.quick:
        figure.text(0.5, 0.5, "quick run: a few steps, no result", color="red", alpha=0.5,
                    fontsize=20, ha="center", va="center", rotation=15)  # fmt: skip
    figure.savefig(args.output, dpi=110)
    print(f"wrote {args.output}")


def elpd(score: Any) -> float:
    """The leave-one-out score in what ``loo`` returns, under ArviZ 0.x and 1.x."""
    return float(score.elpd if hasattr(score, "elpd") else score.elpd_loo)


def effective_parameters(score: Any) -> float:
    """The effective number of parameters in what ``loo`` returns, under ArviZ 0.x and 1.x."""
    return float(score.p if hasattr(score, "elpd") else score.p_loo)
