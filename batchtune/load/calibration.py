"""How fast is the client itself? Measured once per run against a server that does nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from batchtune.errors import MeasurementInvalidError
from batchtune.load.fleet import LoadFleet
from batchtune.load.null_server import GRPC_ANSWER, REST_ANSWER, NullServer
from batchtune.load.worker.job import LoadJob
from batchtune.scenario.arrivals import ClosedLoop
from batchtune.scenario.payloads import RequestSet

DURATION_S: Final = 0.7
WARM_UP_S: Final = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What the client reaches with nothing behind the wire.

    `client_max_rps` is the rate at which its cores would be fully busy: cores / CPU per request. The rate measured,
    `reached_rps`, may be lower, since the null server may share those cores.
    """

    client_max_rps: float
    reached_rps: float
    cpu_per_request_s: float
    client_cores: int


def calibrate(
    fleet: LoadFleet,
    requests: RequestSet,
    *,
    duration_s: float = DURATION_S,
    answer_bytes: int | None = None,
    server_cpus: Sequence[int] | None = None,
) -> Calibration:
    """Send the same requests, in a closed loop, to a null server for `duration_s` after a short warm-up.

    `answer_bytes`: the size of the real server's answers, if known.

    Raises:
        MeasurementInvalidError: the client cannot even talk to the null server.
    """
    rest_answer, grpc_answer = REST_ANSWER, GRPC_ANSWER
    if answer_bytes is not None:
        rest_answer = grpc_answer = bytes(answer_bytes)
    with NullServer(rest_answer=rest_answer, grpc_answer=grpc_answer, cpus=server_cpus) as server:
        job = LoadJob(
            endpoint=server.endpoint,
            requests=requests,
            arrivals=ClosedLoop(concurrency=32 * fleet.processes, duration_s=duration_s),
            check_every=0,
        )
        fleet.run(replace(job, arrivals=replace(job.arrivals, duration_s=WARM_UP_S)))
        samples = fleet.run(job)
    errors = samples.errors()
    answered = len(samples) - sum(errors.values())
    if answered == 0 or errors:
        raise MeasurementInvalidError(
            f"the client cannot be calibrated: {errors or 'no answers'} from the null server",
            hint="is loopback traffic blocked?",
        )
    cpu_per_request_s = samples.client_cpu_s / answered
    reached_rps = answered / samples.wall_s
    return Calibration(
        client_max_rps=max(reached_rps, samples.client_cores / cpu_per_request_s),
        reached_rps=reached_rps,
        cpu_per_request_s=cpu_per_request_s,
        client_cores=samples.client_cores,
    )
