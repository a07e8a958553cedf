"""The tables of the pages, by topic. `docs/tables.py` puts them where they belong."""
