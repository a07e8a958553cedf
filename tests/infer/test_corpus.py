"""Hard models are fitted right, or refused in words."""

import re
import warnings

import numpy as np
import pytest
from corpus import CORPUS, STORED, Entry, expected, stored_answers


def run(entry: Entry):
    """What a fit found, and the warnings that it gave."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = entry.run()
    return found, [str(w.message) for w in caught if issubclass(w.category, UserWarning)]


@pytest.mark.slow
@pytest.mark.parametrize("name", CORPUS)
def test_accepted_and_right_or_refused(name):
    entry = CORPUS[name]
    if entry.refused is not None:
        with pytest.raises((TypeError, ValueError), match=entry.refused), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            entry.run()
        return
    found, said = run(entry)
    if entry.warns is None:
        assert not said
    else:
        assert any(re.search(entry.warns, words) for words in said), said
    if entry.answer is None:
        assert entry.warns is not None  # being told is all that is asked for
        return
    answer = expected(name)
    assert set(answer) <= set(found)
    for key, right in answer.items():
        mean, sd = found[key]
        off = np.abs(np.reshape(mean, np.shape(right.mean)) - right.mean) / right.sd
        assert off.max() <= entry.mean, f"mean of {key}: {off.max():.3g} standard deviations off"
        if entry.sd is not None and sd is not None:
            ratio = np.abs(np.reshape(sd, np.shape(right.sd)) / right.sd - 1)
            assert ratio.max() <= entry.sd, f"standard deviation of {key}: {ratio.max():.3g} off"


def test_stored_answers_are_those_of_the_corpus():
    stored = {name for name, entry in CORPUS.items() if entry.stored}
    assert stored == set(stored_answers()), f"python -m corpus brings {STORED} up to date"
    assert len(CORPUS) >= 40
