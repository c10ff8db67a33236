"""gRPC closed loop side by side with h2load, both recording every request, and grpc.aio for reference.

python tests/benchmarks/load/load_grpc.py
1 KB messages, 32 streams in flight, nghttpd answers; one core each. Bars: our CPU per request is at most h2load's
(with --log-file), and at most a tenth of grpc.aio's.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial

from tests.benchmarks.rivals import (
    Run,
    alternate,
    h2load,
    nghttpd,
    ours,
    print_host,
    print_ratio,
    print_table,
    require,
    run_ours,
)

ROUNDS, RUN_S, STREAMS, MESSAGE = 3, 2, 32, b"x" * 1024
LAYOUTS = (4, 1)  # connections


def grpc_aio(port: int, path: str) -> Run:
    import grpc
    import uvloop

    async def run() -> Run:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = channel.unary_unary(path)
            await call(MESSAGE)
            answered = 0
            end = time.monotonic() + RUN_S

            async def user() -> None:
                nonlocal answered
                while time.monotonic() < end:
                    await call(MESSAGE)
                    answered += 1

            cpu_s = time.process_time()
            await asyncio.gather(*(user() for _ in range(STREAMS)))
            return Run(answered=answered, wall_s=RUN_S, cpu_s=time.process_time() - cpu_s)

    return asyncio.Runner(loop_factory=uvloop.new_event_loop).run(run())


def main() -> None:
    require("h2load", "nghttpd")
    with nghttpd() as (port, path):
        contestants = {}
        for count in LAYOUTS:
            layout = f"{count} connections of {STREAMS // count}"
            shape = {"connections": count, "seconds": RUN_S, "path": path}
            contestants[f"h2load, {layout}"] = partial(
                h2load, port, MESSAGE, streams=STREAMS // count, **shape
            )
            contestants[f"batchtune, {layout}"] = partial(
                run_ours, ours, "grpc", port, MESSAGE, users=STREAMS, **shape
            )
        contestants["grpc.aio"] = partial(run_ours, grpc_aio, port, path)
        runs = alternate(ROUNDS, contestants)
    print_table(runs)
    names = list(runs)
    for rival, mine in ((0, 1), (2, 3), (4, 1)):
        bar = "0.10" if names[rival] == "grpc.aio" else "1.00"
        print_ratio(runs, names[mine], names[rival], "cpu_micros", bar)
    print_host()


if __name__ == "__main__":
    main()
