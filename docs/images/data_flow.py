"""Draws ``data_flow.svg``: how a model becomes a fit.

python docs/images/data_flow.py
"""

from pathlib import Path

import matplotlib.pyplot as plt

plt.rcParams["svg.hashsalt"] = "data_flow"  # the same file every time
plt.rcParams["font.family"] = "DejaVu Sans"

BOXES = {  # name: (x, y, title, what it is, colour)
    "model": (0.0, 2.0, "your model", "NumPyro, with GP sites", "#fff3d6"),
    "extract": (
        2.6,
        2.0,
        "extract, checks",
        "GP sites + one scalar\nlog-likelihood of f",
        "#e3edf8",
    ),
    "features": (5.2, 2.9, "kernels, linalg", "$L$, whitened features $w_i$", "#e3edf8"),
    "expect": (
        5.2,
        1.1,
        "expectations",
        "$E_i$, and its gradients\n$\\alpha_i$, $\\beta_i$",
        "#e3edf8",
    ),
    "sites": (7.8, 2.0, "sites", "$\\lambda_1$, $\\Lambda_2$\nposterior, KL", "#e5f4e3"),
    "bound": (7.8, 0.0, "bound", "expectations minus KL,\nplus log prior of $\\theta$", "#f8e3e3"),
    "guide": (10.4, 2.0, "guide", "$q(f)$ at any inputs", "#e5f4e3"),
    "arviz": (13.0, 2.0, "ArviZ, Predictive", "summary, LOO,\npredictions", "#fff3d6"),
}
WIDTH, HEIGHT = 2.1, 0.95

fig, ax = plt.subplots(figsize=(17, 5.5))
for x, y, title, text, colour in BOXES.values():
    ax.add_patch(
        plt.Rectangle((x, y), WIDTH, HEIGHT, facecolor=colour, edgecolor="#444444", linewidth=1.1)
    )
    ax.text(x + WIDTH / 2, y + 0.74, title, ha="center", va="center", fontsize=9.5, weight="bold")
    ax.text(x + WIDTH / 2, y + 0.33, text, ha="center", va="center", fontsize=9)


def arrow(a, b, text="", start=(1.0, 0.5), end=(0.0, 0.5), curve=0.0, at=(0.0, 0.12), **style):
    (xa, ya, *_), (xb, yb, *_) = BOXES[a], BOXES[b]
    p = xa + start[0] * WIDTH, ya + start[1] * HEIGHT
    q = xb + end[0] * WIDTH, yb + end[1] * HEIGHT
    style = {"arrowstyle": "-|>", "color": "#444444", "linewidth": 1.3, **style}
    style["connectionstyle"] = f"arc3,rad={curve}"
    ax.annotate("", q, p, arrowprops=style)
    middle = (p[0] + q[0]) / 2 + at[0], (p[1] + q[1]) / 2 + at[1]
    ax.text(*middle, text, ha="center", va="center", fontsize=9, color=style["color"])


RED, BLUE = "#a33333", "#2b5d9b"
arrow("model", "extract")
arrow("extract", "features", end=(0.0, 0.4))
arrow("extract", "expect", end=(0.0, 0.6))
arrow("features", "sites", start=(1.0, 0.4), end=(0.0, 0.8))
arrow("expect", "sites", end=(0.0, 0.2), color=BLUE)
ax.text(7.15, 2.1, "E-step", fontsize=10, color=BLUE, ha="center", weight="bold")
arrow("sites", "expect", "", (0.4, 0.0), (1.0, 0.25), -0.25, (0.75, -0.12), color=BLUE)
ax.text(8.75, 1.22, "marginals\n$m_i, v_i$", fontsize=9, color=BLUE, ha="center")
arrow("sites", "bound", start=(0.75, 0.0), end=(0.75, 1.0), color=RED)
arrow("expect", "bound", start=(0.5, 0.0), end=(0.0, 0.4), curve=0.25, color=RED)
arrow(
    "bound",
    "model",
    "M-step: the optimizer moves hyperparameters $\\theta$ and inducing inputs, sites held",
    (0.0, 0.15),
    (0.5, 0.0),
    -0.18,
    (-0.9, -1.3),
    color=RED,
)
arrow("sites", "guide")
arrow("guide", "arviz")
ax.set(xlim=(-0.2, 15.2), ylim=(-0.5, 4.0))
ax.set_aspect("equal")
ax.axis("off")
fig.savefig(Path(__file__).with_suffix(".svg"), bbox_inches="tight", metadata={"Date": None})
