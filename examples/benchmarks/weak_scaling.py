"""Weak scaling: the time of an update at fixed rows a device, for 1, 2 and 4 devices or processes.

    python examples/benchmarks/weak_scaling.py

Each point is measured in fresh processes on this machine: devices of one process, or processes over
the loopback interface (gloo), each with 20,000 rows, 200 inducing inputs and one function. With
fewer cores than devices the work of all shares the cores, so that times grow with their number. The
processor time for each device does not, except for what working together costs, and other work on
the machine hardly enters it. Prints a table and writes it.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path


def worker(kind: str, count: int, rank: int, port: int, rows: int, inducing: int) -> None:
    import jax

    if kind == "processes" and count > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{port}", count, rank)
    import jax.numpy as jnp
    import numpy as np
    import numpyro
    import numpyro.distributions as dist
    import optax
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    from numpyro_tsvgp import GP, TSVGP, AutoDualGaussian, kernels
    from numpyro_tsvgp.gaussian.linalg import blas_threads
    from numpyro_tsvgp.infer.feed.sharding import placed
    from numpyro_tsvgp.model.arguments import Call

    def model(X, y=None):
        f = numpyro.sample("f", GP(kernels.Matern52(0.3), X))
        with numpyro.plate("data", X.shape[0]):
            numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)

    rng = np.random.RandomState(rank)
    mine = rows * (count if kind == "devices" else 1)
    X = rng.rand(mine, 2).astype(np.float32)
    y = rng.poisson(np.exp(np.sin(5 * X[:, 0])))
    mesh = jax.make_mesh((jax.device_count(),), ("rows",), axis_types=(AxisType.Auto,))
    call = placed(Call((X, y), {}).on_device(), NamedSharding(mesh, PartitionSpec("rows")))
    Z = np.random.RandomState(9).rand(inducing, 2).astype(np.float32)
    svi = TSVGP(model, AutoDualGaussian(model, inducing=Z), optax.adam(0.01))
    state = svi.init(jax.random.key(0), *call.args)
    times = []
    with blas_threads():
        for i in range(12):
            if i == 2:
                used = time.process_time()
            start = time.perf_counter()
            state, loss = svi.compiled_update(state, call)
            loss.block_until_ready()
            times.append(time.perf_counter() - start)
    times = sorted(times[2:])
    used = (time.process_time() - used) / len(times)
    print(json.dumps([times[len(times) // 2], times[0], used]), flush=True)


def measured(kind: str, count: int, rows: int, inducing: int) -> tuple[float, float, float]:
    """Median and shortest time of an update, of the slowest process; processor time, of all."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    devices = count if kind == "devices" else 1
    flags = f"--xla_force_host_platform_device_count={devices}"
    command = [sys.executable, __file__, "--worker", kind, "--count", str(count)]
    command += ["--port", str(port), "--rows", str(rows), "--inducing", str(inducing)]
    processes = [
        subprocess.Popen(
            [*command, "--rank", str(rank)],
            env={**os.environ, "XLA_FLAGS": flags},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(count if kind == "processes" else 1)
    ]
    said = [process.communicate(timeout=600)[0] for process in processes]
    found = [json.loads(text.strip().splitlines()[-1]) for text in said]
    medians, shortest, used = zip(*found, strict=True)
    return max(medians), max(shortest), sum(used)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--worker")
    for name, default in (("count", 1), ("rank", 0), ("port", 0), ("rows", 20_000)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--inducing", type=int, default=200)
    parser.add_argument("--quick", action="store_true", help="few rows and two at most, for tests")
    parser.add_argument("--kind", choices=["devices", "processes"], help="one of them; else both")
    parser.add_argument("--counts", type=int, nargs="*", default=(1, 2, 4), help="how many")
    parser.add_argument("--output", type=Path, default=Path("weak_scaling.csv"), help="the table")
    args = parser.parse_args()
    if args.worker:
        worker(args.worker, args.count, args.rank, args.port, args.rows, args.inducing)
        sys.exit()
    if args.quick:
        args.rows, args.inducing, args.counts = 200, 10, (1, 2)
    cores = len(os.sched_getaffinity(0))
    print(f"{cores} cores, {args.rows:,} rows a device, {args.inducing} inducing inputs, float32")
    # What another part has measured stays in the table.
    lines = args.output.read_text().splitlines()[1:] if args.output.exists() else []
    table = {tuple(line.split(",")[:2]): line for line in lines}
    for kind in [args.kind] if args.kind else ["devices", "processes"]:
        for count in args.counts:
            median, shortest, used = (
                1e3 * t for t in measured(kind, count, args.rows, args.inducing)
            )
            print(
                f"{count} {kind:9s} {median:7.1f} ms an update, {shortest:.1f} at best; "
                f"{used / count:.1f} ms of processors for each"
            )
            table[kind, str(count)] = f"{kind},{count},{median:.1f},{shortest:.1f},{used:.1f}"
    rows = [line for _, line in sorted(table.items())]
    args.output.write_text(
        "\n".join(["kind,count,median_ms,shortest_ms,processor_ms", *rows]) + "\n"
    )
