"""How many programs were compiled, and how many of them a cache on disk did not have."""

import jax

_counts = {"compiled": 0, "not_cached": 0}


def _on_duration(event: str, duration: float, **_: object) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        _counts["compiled"] += 1


def _on_event(event: str, **_: object) -> None:
    if event == "/jax/compilation_cache/cache_misses":
        _counts["not_cached"] += 1


jax.monitoring.register_event_duration_secs_listener(_on_duration)
jax.monitoring.register_event_listener(_on_event)


def compiled() -> int:
    """Programs that were compiled, or loaded from a cache on disk, since this was imported."""
    return _counts["compiled"]


def not_cached() -> int:
    """Those of them that were not in the cache on disk."""
    return _counts["not_cached"]
