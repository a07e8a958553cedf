"""Draws ``data_flow.svg``: how a model becomes a fit.

python docs/images/data_flow.py
"""

from pathlib import Path

import matplotlib.pyplot as plt

plt.rcParams["svg.hashsalt"] = "data_flow"  # the same file every time
plt.rcParams["font.family"] = "DejaVu Sans"

YOURS, MODEL, GAUSSIAN, INFER = "#fff3d6", "#e3edf8", "#e5f4e3", "#f8e3e3"
RED, BLUE = "#a33333", "#2b5d9b"
BOXES = {  # name: (x, y, title, what it is, colour)
    "model": (0.0, 2.0, "your model", "NumPyro, with GP sites", YOURS),
    "reading": (
        2.9,
        2.0,
        "reading, structure",
        "GP sites, and one scalar\nlog-likelihood of f",
        MODEL,
    ),
    "quadrature": (
        2.9,
        4.0,
        "quadrature",
        "$E_i$, and its gradients\n$\\alpha_i$, $\\beta_i$ in the marginals",
        GAUSSIAN,
    ),
    "rule": (6.4, 4.0, "site rule", "what the sites become", INFER),
    "approximation": (
        6.4,
        2.0,
        "approximation",
        "sites, factors, features:\n$q(f)$ and its divergence",
        GAUSSIAN,
    ),
    "objective": (6.4, 0.0, "objective", "the bound: expectations\nminus divergences", INFER),
    "fit": (9.6, 2.0, "fit", "$q(f)$ at any inputs;\nsaved, audited", INFER),
    "arviz": (12.5, 2.0, "ArviZ, Predictive", "summary, leave-one-out,\npredictions", YOURS),
}
WIDTH, HEIGHT = 2.3, 0.95

fig, ax = plt.subplots(figsize=(17, 6.2))
for x, y, title, text, colour in BOXES.values():
    ax.add_patch(
        plt.Rectangle((x, y), WIDTH, HEIGHT, facecolor=colour, edgecolor="#444444", linewidth=1.1)
    )
    ax.text(x + WIDTH / 2, y + 0.76, title, ha="center", va="center", fontsize=10, weight="bold")
    ax.text(x + WIDTH / 2, y + 0.33, text, ha="center", va="center", fontsize=9.5)


def arrow(a, b, start=(1.0, 0.5), end=(0.0, 0.5), curve=0.0, color="#444444"):
    (xa, ya, *_), (xb, yb, *_) = BOXES[a], BOXES[b]
    p = xa + start[0] * WIDTH, ya + start[1] * HEIGHT
    q = xb + end[0] * WIDTH, yb + end[1] * HEIGHT
    style = {"arrowstyle": "-|>", "color": color, "linewidth": 1.3, "shrinkA": 0, "shrinkB": 1}
    ax.annotate("", q, p, arrowprops={**style, "connectionstyle": f"arc3,rad={curve}"})


def label(x, y, text, color="#444444", **style):
    ax.text(x, y, text, ha="center", va="center", fontsize=9.5, color=color, **style)


arrow("model", "reading")
arrow("reading", "approximation")
label(5.8, 2.62, "priors")
arrow("reading", "quadrature", start=(0.35, 1.0), end=(0.35, 0.0), color=BLUE)
label(2.95, 3.45, "log-likelihood", BLUE)
arrow("approximation", "quadrature", start=(0.1, 1.0), end=(0.9, 0.0), color=BLUE)
label(5.05, 3.25, "marginals $m_i, v_i$", BLUE)
arrow("quadrature", "rule", color=BLUE)
label(5.8, 4.62, "$\\alpha_i, \\beta_i$", BLUE)
arrow("rule", "approximation", start=(0.75, 0.0), end=(0.75, 1.0), color=BLUE)
label(8.5, 3.45, "sites", BLUE)
label(6.9, 3.6, "E-step", BLUE, weight="bold")
arrow("approximation", "objective", start=(0.75, 0.0), end=(0.75, 1.0), color=RED)
label(9.35, 1.45, "marginals, divergence", RED)
arrow("reading", "objective", start=(0.75, 0.0), end=(0.0, 0.75), color=RED)
label(4.55, 1.2, "log-likelihood", RED)
arrow("objective", "model", (0.0, 0.25), (0.5, 0.0), -0.25, RED)
label(2.2, -0.25, "M-step: the optimizer moves hyperparameters and", RED)
label(2.2, -0.5, "inducing inputs, with the sites held", RED)
arrow("approximation", "fit")
arrow("fit", "arviz")
ax.set(xlim=(-0.2, 15.0), ylim=(-0.7, 5.1))
ax.set_aspect("equal")
ax.axis("off")
fig.savefig(Path(__file__).with_suffix(".svg"), bbox_inches="tight", metadata={"Date": None})
