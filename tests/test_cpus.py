"""How many CPUs are there: by affinity, and by quota?"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from batchtune.batching.parameters import BatchingParameters, Configuration, default_num_batch_threads
from batchtune.measure.caveats import settings_of
from batchtune.server.scheduling.batch_queue import SharedBatchScheduler
from batchtune.system import quota_cpus, schedulable_cores, schedulable_cpus, usable_cpus, usable_threads
from batchtune.twin.simulator.simulate import batcher_of


def write(root: Path, name: str, content: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)


def test_a_quota_of_the_second_version_counts(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/\n")
    write(tmp_path, "sys/fs/cgroup/cpu.max", "150000 100000\n")
    assert quota_cpus(tmp_path) == 1.5
    assert usable_cpus(range(64), root=tmp_path) == 1.5
    assert usable_threads(range(64), root=tmp_path) == 2
    assert usable_cpus([3], root=tmp_path) == 1.0


def test_a_quota_of_the_first_version_counts(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "4:cpu,cpuacct:/docker/abc\n")
    write(tmp_path, "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "50000\n")
    write(tmp_path, "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000\n")
    assert (usable_cpus(range(8), root=tmp_path), usable_threads(range(8), root=tmp_path)) == (0.5, 1)


@pytest.mark.parametrize("text", ["max 100000\n", "-1 100000\n", "", "words\n"])
def test_no_quota_leaves_the_affinity(tmp_path: Path, text: str) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/\n")
    write(tmp_path, "sys/fs/cgroup/cpu.max", text)
    assert quota_cpus(tmp_path) is None
    assert usable_cpus(range(3), root=tmp_path) == 3.0


def test_cpus_that_share_a_core_count_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 2, 3, 9})
    assert schedulable_cores(root=tmp_path) == 4
    for cpu, sharing in {0: "0-1", 1: "0-1", 2: "2-3", 3: "2-3", 9: "8-9"}.items():
        write(tmp_path, f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", f"{sharing}\n")
    assert schedulable_cores(root=tmp_path) == 3


def test_the_servers_threads_follow_the_cpus_that_it_may_run_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 5})
    assert schedulable_cpus() == {0, 5}
    assert default_num_batch_threads() == 2
    scheduler = SharedBatchScheduler()
    try:
        assert scheduler._threads.count == 2
    finally:
        scheduler.close()


def test_a_server_on_cpus_of_its_own_has_their_default() -> None:
    defaults, plain = Configuration(batching=BatchingParameters()), Configuration(batching=None)
    assert settings_of(defaults, cpus=[1, 2, 3]).batch_threads == 3
    assert settings_of(plain, cpus=[1, 2, 3]).batch_threads == 12
    assert batcher_of(defaults, cpus=[1, 2, 3]).batch_threads == 3
    assert batcher_of(plain, cpus=[1, 2, 3]).batch_threads == 12
    assert defaults.in_force("num_batch_threads", cpus=[1, 2, 3]) == 3
