"""The emulated language model as a server of its own, and our client's load of it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from batchtune.load.samples import Samples
from batchtune.scenario.arrivals import Arrivals
from batchtune.scenario.payloads import RequestSet
from batchtune.scenario.prompts import build_prompts
from batchtune.scenario.spec.workload import RequestSpec
from tests.load.load_servers import a_job, run_here
from tests.server.server_process import free_ports


@contextmanager
def emulated_llm(**flags: object) -> Iterator[int]:
    """Its port."""
    (port,) = free_ports(1)
    words = [f"--{name.replace('_', '-')}={value}" for name, value in {"port": port, **flags}.items()]
    command = [sys.executable, "-m", "batchtune.server.emulated_llm", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        server.stdout.readline()
        try:
            yield port
        finally:
            server.terminate()


def prompts(tokens: int, *, model: str = "emulated", **openai: object) -> RequestSet:
    """Requests of 20 tokens, with so many in each answer."""
    spec = {"protocol": "openai", "lengths": {"constant": 20}, "timeout": "300s"}
    asked = {**spec, "openai": {"output": {"constant": tokens}, **openai}}
    return build_prompts(RequestSpec.model_validate(asked), model_name=model)


def streamed(port: int, arrivals: Arrivals, requests: RequestSet) -> Samples:
    """What our client saw; every request was answered."""
    samples = run_here(a_job("rest", port, arrivals, requests=requests))
    assert samples.errors() == {}, samples.error_texts
    return samples
