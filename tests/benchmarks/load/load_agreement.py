"""Do we measure what wrk and h2load measure? Same server, same closed loop, same requests, run in turn.

python tests/benchmarks/load/load_agreement.py
The bundled server with an emulated device (2 ms + 0.05 ms × rows, batches of 32). Bars: throughput within 2 %, p50
and p99 within 5 % of theirs.
"""

from __future__ import annotations

from functools import partial

from tests.benchmarks.rivals import (
    alternate,
    h2load,
    ours,
    print_host,
    print_ratio,
    print_table,
    require,
    run_ours,
    wrk,
)
from tests.benchmarks.server.front_ends import BODY, MESSAGE, Case, served_case

ROUNDS, RUN_S, USERS, CONNECTIONS = 4, 2, 16, 4


def main() -> None:
    require("wrk", "h2load")
    streams = {"connections": CONNECTIONS, "streams": USERS // CONNECTIONS, "seconds": RUN_S}
    with served_case(Case(name="agreement", max_batch_size=32, clients=USERS)) as server:
        shape = {"users": USERS, "seconds": RUN_S, "connections": CONNECTIONS}
        runs = alternate(
            ROUNDS,
            {
                "wrk": partial(wrk, server.rest_port, BODY, clients=USERS, seconds=RUN_S),
                "batchtune, REST": partial(run_ours, ours, "rest", server.rest_port, BODY.encode(), **shape),
                "h2load": partial(h2load, server.grpc_port, MESSAGE, **streams),
                "batchtune, gRPC": partial(run_ours, ours, "grpc", server.grpc_port, MESSAGE, **shape),
            },
        )
    print_table(runs)
    for rival, mine in (("wrk", "batchtune, REST"), ("h2load", "batchtune, gRPC")):
        for what, bar in (("rate_rps", "2 %"), ("p50_s", "5 %"), ("p99_s", "5 %")):
            print_ratio(runs, mine, rival, what, bar)
    print_host()


if __name__ == "__main__":
    main()
