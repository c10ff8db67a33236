"""The servers, load processes and benches that the variants of a comparison share, and how long they live."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from batchtune.archive.run import SERVER_LOG, write_original
from batchtune.cli.session import beginning, first_error, fitted, reached, restore_hint
from batchtune.errors import BatchingParametersError, TargetError, UsageError
from batchtune.load.cluster.cluster_fleet import AnyFleet, client_max_rps, fleet_of
from batchtune.load.duet import run_duet
from batchtune.load.fleet import LoadFleet
from batchtune.measure.caveats import HostGuard
from batchtune.report.comparison import variant_line
from batchtune.report.live_view import live_line, plan_load
from batchtune.scenario.spec.workload import LoadSpec
from batchtune.target.choice import LaunchedTarget, placed, target_of
from batchtune.target.command import CommandTarget
from batchtune.target.model_files import resolve_model
from batchtune.target.triton import TritonTarget
from batchtune.tune.bench import Bench, Plan
from batchtune.tune.compare.blocks import Variant, duet_plan, plan_of, request_cost
from batchtune.tune.trials.trial import parts_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from batchtune.report.live_view import View
    from batchtune.scenario.payloads import RequestSet
    from batchtune.tune.trials.pace import Pace
    from batchtune.tune.trials.trial import Trial

_CalibrationKey = tuple[AnyFleet, int, tuple[int, ...] | None, str, int]
"""What the fastest rate of a client depends on: fleet, its processes, the server's CPUs, protocol, bytes of
all bodies."""


@dataclass(slots=True)
class Benches:
    """What the variants of a comparison run on: servers, load processes, and for each variant the bench that
    joins them.

    Servers and load processes start on first use, serve every variant that can share them, and end with
    `stack`. `view`: where progress is shown. `blocks`: how many are planned, for the progress text. `folder`:
    the run's; server logs go there. `apart`: each variant gets a server of its own.
    """

    view: View
    stack: ExitStack
    blocks: int
    folder: Path
    apart: bool = False
    _launched: ExitStack = field(default_factory=ExitStack)
    _launches: int = 0
    _guard: HostGuard = field(default_factory=HostGuard)
    _targets: dict[str, LaunchedTarget] = field(default_factory=dict)
    _fleets: dict[tuple[int, tuple[int, ...] | None, str, str], AnyFleet] = field(default_factory=dict)
    _benches: dict[str, Bench] = field(default_factory=dict)
    _client_max_rps: dict[_CalibrationKey, float] = field(default_factory=dict)
    _place: str = ""
    _again: bool = False

    def __post_init__(self) -> None:
        self.stack.enter_context(self._launched)

    def reached(self, variants: Sequence[Variant]) -> list[Variant]:
        """Return the variants, those on Triton with the batching that is found in their model's configuration there.

        Raises:
            TargetError: no answer, no such model, or the server did not start.
            UsageError: the model cannot be batched, or does not take such requests.
        """
        return [self._with_found(variant) for variant in variants]

    def turn(self, variant: Variant, plan: Plan, attempt: int) -> None:
        """Note which trial runs next, for the progress text; `compare` calls it before each trial."""
        self._place, self._again = f"block {plan.request.block}/{self.blocks}, {variant.name}: ", attempt > 1

    def show(self, trial: Trial) -> None:
        """Show a line on a finished trial, with several models one for each model."""
        for part in parts_of([trial]):
            self.view.event(variant_line(part, again=self._again))

    def bench(self, variant: Variant) -> Bench:
        """Return the bench that runs the variant's trials, made on first use; each of several models has its
        own load processes."""
        if variant.name not in self._benches:
            scenario = variant.scenario
            names = [own.name for own in scenario.target.models] or [""]
            fleets = {name: self._fleet(scenario.load, name) for name in names}
            only = fleets.get("")
            self._benches[variant.name] = Bench(
                scenario,
                self._target(variant),
                only or fleets,
                on_live=lambda plan, live: self.view.live(
                    f"{self._place}{plan_load(plan, scenario)}: {live_line(live)}"
                ),
                guard=self._guard,
                client_max_rps=None
                if only is None
                else partial(self._calibrated, only, scenario.target.cpus),
            )
        return self._benches[variant.name]

    def duet(
        self, pair: Sequence[Variant], trials: Sequence[Trial], paces: Mapping[str, Pace], *, block: int
    ) -> tuple[float, float] | None:
        """Measure the CPU seconds per request of both variants' servers, while the load goes from one to the
        other in short turns.

        Returns (baseline, candidate). None where that cannot be measured: a server whose CPU time cannot be
        read, load from other machines, or answers too slow for short turns. `trials`: the block's runs, whose
        latencies say how long turns must be. `paces`: variant name -> what is known of its server's speed.

        Raises:
            TargetError: a server failed.
            MeasurementInvalidError, UsageError: as `run_duet`.
        """
        plan = duet_plan(pair, trials, block=block)
        fleet, other = (self._fleet(variant.scenario.load) for variant in pair)
        clocks = [clock for variant in pair if (clock := self._target(variant).cpu_clock()) is not None]
        if plan is None or len(clocks) < len(pair) or fleet is not other or not isinstance(fleet, LoadFleet):
            return None
        duration_s = plan.pairs * plan.turn_ns / 1e9
        jobs = [
            self.bench(variant).job(
                plan_of(variant, paces.get(variant.name), block=block), duration_s=duration_s
            )
            for variant in pair
        ]
        self.view.live(f"block {block}/{self.blocks}: CPU time per request, both in turn")
        cost = request_cost(run_duet(fleet, jobs, plan, clocks), planned=plan.pairs)
        for variant in pair if cost is None else ():
            self.require_running(variant)
        return cost

    def launch(self, variant: Variant) -> None:
        """Start the variant's server now, with its configuration.

        Raises:
            TargetError: it does not start, or its kind of server cannot be given the configuration.
        """
        with _naming(variant):
            self._target(variant).apply(variant.configuration)

    def require_running(self, variant: Variant) -> None:
        """Check that the variant's server still runs; a trial would start it anew, and so hide that it died.

        Raises:
            TargetError: it died; the message has the end of its log.
        """
        with _naming(variant):
            self._target(variant).counters()

    def stop_server(self, variant: Variant) -> None:
        """Stop the variant's server; its next trial launches it anew."""
        self._target(variant).stop()

    def stop_servers(self) -> None:
        """Stop every server; the next use launches it anew."""
        self._launched.close()
        self._targets.clear()
        self._benches.clear()

    def _calibrated(
        self, fleet: AnyFleet, server_cpus: tuple[int, ...] | None, requests: RequestSet
    ) -> float:
        """Return the highest rate, requests/s, at which this fleet can send requests of one protocol and
        size; measured once."""
        key = (fleet, fleet.processes, server_cpus, requests.protocol, sum(map(len, requests.bodies)))
        if key not in self._client_max_rps:
            self._client_max_rps[key] = client_max_rps(fleet, requests, server_cpus=server_cpus)
        return self._client_max_rps[key]

    def _with_found(self, variant: Variant) -> Variant:
        target = self._target(variant)
        if not isinstance(target, TritonTarget):
            return variant
        return replace(variant, scenario=fitted(variant.scenario, target.start()))

    def _target(self, variant: Variant) -> LaunchedTarget:
        scenario = variant.scenario
        there = scenario.target.runs_already
        apart = self.apart and not there
        key = f"{variant.name} {variant.server_key}" if apart else variant.server_key
        if key not in self._targets:
            target = target_of(scenario, on_event=self.view.event, several_models=True)
            self.view.event(beginning(scenario) if there else f"launching the server for {variant.name}")
            self._launched.callback(self._close, target)
            if isinstance(target, TritonTarget):
                keep = partial(write_original, self.folder)
                reached(target, self.view, keep)
                target.keep_original(keep)
            elif isinstance(target, CommandTarget):
                target.attach(partial(write_original, self.folder))
                if scenario.target.launch is None and (error := first_error(scenario, target)):
                    raise error
            self._targets[key] = target
            self._launches += 1
            name = SERVER_LOG if self._launches == 1 else f"server-{self._launches}.log"
            target.keep_log(self.folder / name)
        return self._targets[key]

    def _close(self, target: LaunchedTarget) -> None:
        try:
            target.close()
        except TargetError as error:
            raise TargetError(error.message, hint=restore_hint(self.folder)) from error

    def _fleet(self, load: LoadSpec, model: str = "") -> AnyFleet:
        key = (load.processes, load.cpus, str(load.fleet), model)
        if key not in self._fleets:
            fleet = fleet_of(load, on_event=self.view.event)
            self.stack.enter_context(fleet)
            self._fleets[key] = fleet
        return self._fleets[key]


@contextmanager
def _naming(variant: Variant) -> Iterator[None]:
    """Put the variant's name before the message of an error of its server.

    Raises:
        TargetError: in place of a TargetError or BatchingParametersError from within.
    """
    try:
        yield
    except (TargetError, BatchingParametersError) as error:
        raise TargetError(f"{variant.name}: {error.message}", hint=error.hint) from error


def placed_variants(variants: Sequence[Variant], view: View) -> list[Variant]:
    """Return the variants with CPUs chosen for server and load processes; the view shows once which."""
    placements = [(variant, *placed(variant.scenario)) for variant in variants]
    for note in dict.fromkeys(note for _, _, note in placements if note):
        view.event(note)
    return [replace(variant, scenario=scenario) for variant, scenario, _ in placements]


def check_targets(variants: Sequence[Variant], view: View) -> None:
    """Check, before the first server is launched, that the variants' models exist and their servers can be
    compared.

    Raises:
        UsageError: a model that does not exist, a protocol that its server does not speak, a server that
            takes no configurations, or two servers that a run would have to put back.
    """
    for variant in variants:
        request, target = variant.scenario.request, variant.scenario.target
        if target.kind == "external":
            raise UsageError(
                f"{variant.name}: an external server is loaded as it is, never reconfigured",
                hint="`batchtune load` measures any server as it is",
            )
        if target.kind == "tfserving" and request.protocol.startswith("kserve_"):
            raise UsageError(f"{variant.name}: no {target.kind} server speaks {request.protocol}")
    targets = [variant.scenario.target for variant in variants]
    if len({(target.rest_url or target.url, target.model) for target in targets if target.attached}) > 1:
        raise UsageError(
            "the variants attach to several servers or models; a run restores only one",
            hint="compare configurations of one model, or have batchtune launch the servers",
        )
    if any(target.kind == "command" for target in targets) and len(set(map(repr, targets))) > 1:
        raise UsageError(
            "the variants have different targets of kind command: a run has one such server, and restores only that",
            hint="write the differences in fixed: the commands get them",
        )
    keys: dict[tuple[str, str | None], tuple[str | int, ...]] = {}  # variants of one model share it
    for target in targets:
        if target.kind == "tfserving":
            for number, own in enumerate(target.models):
                keys.setdefault((own.model, target.framework), ("target", "models", number, "model"))
            if not target.models:
                keys.setdefault((target.model, target.framework), ("target", "model"))
    for (model, framework), key in keys.items():
        resolve_model(model, framework=framework, at=key, on_event=view.event)
