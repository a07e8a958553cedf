"""Addresses of other projects' pages, from short lists that lie in this repository.

Sphinx would fetch each project's whole inventory from its site, at every build. A list here has
the names that our pages use, one to a line, ``name kind address``, below a first line with the
address of the site. They become inventories in Sphinx's format in the build folder.
"""

import zlib
from pathlib import Path


def write(lines: list[str], name: str, to: Path) -> None:
    """An inventory of version 2: four lines of text, then compressed lines."""
    head = f"# Sphinx inventory version 2\n# Project: {name}\n# Version: \n"
    head += "# The remainder of this file is compressed using zlib.\n"
    body = ""
    for line in lines:
        thing, kind, address = line.split()
        body += f"{thing} py:{kind} 1 {address} -\n"
    to.parent.mkdir(parents=True, exist_ok=True)
    to.write_bytes(head.encode() + zlib.compress(body.encode()))


def mapping(folder: Path, to: Path) -> dict[str, tuple[str, str]]:
    """What ``intersphinx_mapping`` wants, for every ``.txt`` file of a folder."""
    found = {}
    for path in sorted(folder.glob("*.txt")):
        site, *lines = [line for line in path.read_text("utf8").splitlines() if line.strip()]
        inventory = to / f"{path.stem}.inv"
        write(lines, path.stem, inventory)
        found[path.stem] = (site.strip(), str(inventory))
    return found
