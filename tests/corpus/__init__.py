"""Models that are hard to get right, with their data and an answer that does not come from here.

Each entry is either accepted, with posterior moments by other means to compare with, or refused,
with the words of the refusal. There is no third thing. Answers come from :mod:`answers`: Gaussian
algebra and grids are computed when asked for; those of long Markov chains are in
``tests/data/corpus.json``, and ``python -m corpus NAME ...`` in ``tests``
computes them anew.

Tolerances are those of an entry: ``mean`` in posterior standard deviations, ``sd`` relative. What
is exact is compared to rounding. A Gaussian that is fitted to a posterior which is none may be off
by 0.05 standard deviations in its mean and by 6% in its standard deviation, unless an entry says
why it is allowed more. Chains of NUTS of a few hundred draws are off by 0.1 by themselves.
"""

from corpus import (  # noqa: F401
    drifting,
    hyperparameters,
    latents,
    likelihoods,
    practice,
    reads,
    regression,
)
from corpus.entries import CORPUS, STORED, Entry, expected, reference, stored_answers

__all__ = ["CORPUS", "STORED", "Entry", "expected", "reference", "stored_answers"]
