"""REST closed loop side by side with wrk: 1 KB bodies, 32 connections, nginx answers; one core each.

python tests/benchmarks/load/load_rest.py
Bar: our CPU per request, every request recorded, is at most 1.1 times wrk's.
"""

from __future__ import annotations

from tests.benchmarks.rivals import (
    alternate,
    nginx,
    ours,
    print_host,
    print_ratio,
    print_table,
    require,
    run_ours,
    wrk,
)

ROUNDS, RUN_S, USERS, BODY = 5, 2, 32, "x" * 1024


def main() -> None:
    require("wrk", "nginx")
    with nginx() as port:
        contestants = {
            "wrk": lambda: wrk(port, BODY, clients=USERS, seconds=RUN_S),
            "batchtune": lambda: run_ours(ours, "rest", port, BODY.encode(), users=USERS, seconds=RUN_S),
        }
        runs = alternate(ROUNDS, contestants)
    print_table(runs)
    print_ratio(runs, "batchtune", "wrk", "cpu_micros", "1.10")
    print_host()


if __name__ == "__main__":
    main()
