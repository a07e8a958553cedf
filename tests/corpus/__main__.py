"""Computes answers that are stored: all, or those of the entries that are named."""

import json
import sys

import jax
import numpy as np

from corpus import CORPUS, STORED, reference


def main(names: list[str]) -> None:
    """Computes stored answers anew, all or those of some entries, and writes them."""
    for name, entry in CORPUS.items():
        if not entry.stored or (names and name not in names):
            continue
        print(name, flush=True)
        stored = json.loads(STORED.read_text()) if STORED.exists() else {}
        stored[name] = {
            f"{key} {k}": np.round(v, 4).tolist()
            for key, moments in reference(name).items()
            for k, v in moments._asdict().items()
        }
        lines = [
            f'"{name}": {{\n  '
            + ",\n  ".join(f'"{k}": {json.dumps(v)}' for k, v in stored[name].items())
            + "\n}"
            for name in sorted(stored)
        ]
        STORED.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    main(sys.argv[1:])
