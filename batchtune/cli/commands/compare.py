"""`batchtune compare`: the scenario's variants side by side, and in plain words what makes the difference."""

from __future__ import annotations

import json as json_text
import sys
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from batchtune.archive.run import SERVER_LOG, create_run
from batchtune.cli.commands.report import report_at_end
from batchtune.errors import MeasurementInvalidError, TargetError, UsageError
from batchtune.load.calibration import calibrate
from batchtune.load.fleet import LoadFleet
from batchtune.measure.validity.host import HostGuard
from batchtune.report.comparison import print_comparison, variant_line
from batchtune.report.live import live_line, plan_load, sweep_view
from batchtune.scenario.placement import placed
from batchtune.scenario.reader import ScenarioText, format_scenario, read_scenario, read_variants
from batchtune.scenario.spec.load import LoadSpec
from batchtune.scenario.units import counted
from batchtune.target.model_files import resolve_model
from batchtune.target.tfserving import TfServingTarget
from batchtune.tune.bench import Bench
from batchtune.tune.compare.blocks import Turn, Variant, chosen_variants, compare
from batchtune.tune.compare.pace_probes import comparison_text, pace_text, probed_paces
from batchtune.tune.compare.result import Comparison, summarise

if TYPE_CHECKING:
    from collections.abc import Sequence

    from batchtune.archive.run import Run
    from batchtune.report.live import View
    from batchtune.scenario.payloads import RequestSet
    from batchtune.scenario.spec.scenario import Scenario
    from batchtune.tune.trials.trial import Trial

INTERRUPTED = 130


def run_compare(
    path: Path | ScenarioText,
    overrides: list[str],
    *,
    baseline: str | None,
    blocks: int,
    results: Path,
    json: bool,
    quiet: bool,
) -> int:
    """The exit code.

    0; 6 when a pair is client-limited, or the host disturbed every run of a variant (repeats included); 7 when a
    variant failed; 130 when interrupted. That two variants cannot be told apart is an answer, and ends with 0.
    """
    scenario = read_scenario(path, overrides=overrides)
    variants = chosen_variants(read_variants(path, overrides=overrides), baseline=baseline)
    done = run_blocks(scenario, variants, kind="compare", blocks=blocks, results=results, quiet=quiet)
    if done.run is None:
        return INTERRUPTED
    comparison = summarise(done.trials, variants)
    done.run.write_comparison(comparison.to_dict())
    if json:
        print(json_text.dumps({"run": str(done.run.path), **comparison.to_dict()}, indent=2))
    elif done.trials:
        print_comparison(comparison, path=done.run.path)
    if done.trials:
        report_at_end(done.run, quiet=quiet)
    return INTERRUPTED if done.interrupted else _exit_code(comparison)


@dataclass(slots=True, kw_only=True)
class Blocks:
    """What was run and kept; `run` is None when Ctrl-C came before the first trial."""

    run: Run | None = None
    trials: list[Trial] = field(default_factory=list)
    interrupted: bool = False


def run_blocks(
    scenario: Scenario,
    variants: Sequence[Variant],
    *,
    kind: Literal["compare", "noise"],
    blocks: int,
    results: Path,
    quiet: bool,
) -> Blocks:
    """Run the blocks, keep each trial as it ends; Ctrl-C ends them early.

    Raises:
        UsageError: a model that does not exist, or a protocol that no launched server speaks.
    """
    done = Blocks()
    scenario, _ = placed(scenario)
    placements = [(variant, *placed(variant.scenario)) for variant in variants]
    variants = [replace(variant, scenario=apart) for variant, apart, _ in placements]
    with sweep_view(quiet=quiet) as view, ExitStack() as stack:
        for note in dict.fromkeys(note for _, _, note in placements if note):
            view.event(note)
        try:
            _check(variants, view)
            run = done.run = create_run(scenario, format_scenario(scenario), root=results, kind=kind)
            view.event(f"{blocks} blocks of {len(variants)} variants; results go to {run.path}")
            benches = _Benches(view, stack, blocks=blocks, folder=run.path)
            paces = probed_paces(variants, bench_of=benches.of)
            for variant in variants:
                view.event(pace_text(variant, paces[variant.name]))
            view.event(comparison_text(variants, paces, blocks=blocks))
            for finished in compare(
                variants, blocks=blocks, bench_of=benches.of, on_turn=benches.turn, paces=paces
            ):
                run.append(finished.trial, finished.samples)
                done.trials.append(finished.trial)
                view.event(variant_line(finished.trial))
        except KeyboardInterrupt:
            done.interrupted = True
    if done.interrupted:
        kept = "" if done.run is None else f"; {counted(len(done.trials), 'trial')} kept in {done.run.path}"
        print(f"interrupted{kept}", file=sys.stderr)
    return done


def _check(variants: Sequence[Variant], view: View) -> None:
    for variant in variants:
        request, target = variant.scenario.request, variant.scenario.target
        if request.protocol.startswith("kserve_"):
            raise UsageError(f"{variant.name}: no {target.kind} server speaks {request.protocol}")
    targets = (variant.scenario.target for variant in variants)
    for model, framework in dict.fromkeys((target.model, target.framework) for target in targets):
        resolve_model(model, framework=framework, on_event=view.event)


@dataclass(slots=True)
class _Benches:
    """A launched server for each distinct target, a fleet for each number and place of processes, a bench a variant.

    All start on first use and live until the end; the host guard and what the client can do at most are shared.
    """

    view: View
    stack: ExitStack
    blocks: int
    folder: Path
    _guard: HostGuard = field(default_factory=HostGuard)
    _targets: dict[str, TfServingTarget] = field(default_factory=dict)
    _fleets: dict[tuple[int, tuple[int, ...] | None], LoadFleet] = field(default_factory=dict)
    _benches: dict[str, Bench] = field(default_factory=dict)
    _client_max_rps: dict[tuple[str, int, int], float] = field(default_factory=dict)
    _turn: Turn | None = None

    def turn(self, turn: Turn) -> None:
        self._turn = turn

    def of(self, variant: Variant) -> Bench:
        if variant.name not in self._benches:
            fleet = self._fleet(variant.scenario.load)
            self._benches[variant.name] = Bench(
                variant.scenario,
                self._target(variant),
                fleet,
                on_live=lambda plan, live: self._show(
                    f"{plan_load(plan, variant.scenario)}: {live_line(live)}"
                ),
                guard=self._guard,
                client_max_rps=partial(self._calibrated, fleet, variant.scenario.target.cpus),
            )
        return self._benches[variant.name]

    def _show(self, line: str) -> None:
        if self._turn is not None:
            self.view.live(f"block {self._turn.block} of {self.blocks}, {self._turn.variant.name}, {line}")

    def _calibrated(
        self, fleet: LoadFleet, server_cpus: tuple[int, ...] | None, requests: RequestSet
    ) -> float:
        """What this fleet can send at most: measured once for requests of one protocol and size."""
        key = (requests.protocol, sum(map(len, requests.bodies)), fleet.processes)
        if key not in self._client_max_rps:
            self._client_max_rps[key] = calibrate(fleet, requests, server_cpus=server_cpus).client_max_rps
        return self._client_max_rps[key]

    def _target(self, variant: Variant) -> TfServingTarget:
        if variant.server_key not in self._targets:
            self.view.event(f"launching the server for {variant.name}")
            target = TfServingTarget(variant.scenario.target, on_event=self.view.event)
            self._targets[variant.server_key] = self.stack.enter_context(target)
            number = len(self._targets)
            target.keep_log(self.folder / (SERVER_LOG if number == 1 else f"server-{number}.log"))
        return self._targets[variant.server_key]

    def _fleet(self, load: LoadSpec) -> LoadFleet:
        key = (load.processes, load.cpus)
        if key not in self._fleets:
            fleet = LoadFleet(processes=load.processes, cpus=load.cpus)
            self._fleets[key] = self.stack.enter_context(fleet)
        return self._fleets[key]


def _exit_code(comparison: Comparison) -> int:
    if any(one.failure is not None for one in comparison.variants):
        return TargetError.exit_code
    if any(one.outcome == "client-limited" for one in comparison.pairs):
        return MeasurementInvalidError.exit_code
    disturbed = [one.name for one in comparison.variants if one.disturbed]
    return void_by_host(" and of ".join(disturbed)) if disturbed else 0


def void_by_host(whose: str) -> int:
    """Say why the figures do not count; the exit code."""
    print(f"invalid: the host disturbed every run of {whose}, also when it was repeated", file=sys.stderr)
    return MeasurementInvalidError.exit_code
