"""`batchtune simulate` and `plan`: calibrate the twin of a run, and predict other parameters and loads with it."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from batchtune.archive.run import Run
from batchtune.batching.parameters import (
    LENGTH_BUCKETS,
    PARAMETER_NAMES,
    Configuration,
    ServerWord,
    did_you_mean,
    to_dict,
)
from batchtune.batching.triton_words import MISSING, SETTINGS, WORDS
from batchtune.cli.arguments.load_request import points_of, rates_rps, refuse_range
from batchtune.cli.arguments.overrides import in_place_of, of_option, promised
from batchtune.cli.session import asked_run, kept_trials
from batchtune.errors import NO_ANSWER, InconclusiveError, TwinError, UsageError
from batchtune.measure.slo import limits_of
from batchtune.plain_values import as_text, to_plain
from batchtune.report import twin_text
from batchtune.report.findings import print_json, worded
from batchtune.report.twin_text import Simulated, note_when_slow
from batchtune.scenario.spec.check import SloSpec
from batchtune.scenario.spec.knobs import KNOBS, configuration_of, http_configuration
from batchtune.scenario.spec.scenario import Scenario
from batchtune.tune.answer.recommend import recommend
from batchtune.tune.answer.recommendation import Recommendation, capacity_of
from batchtune.tune.trials.trial import Trial, without_superseded
from batchtune.twin.calibrate import calibrate, observation_of
from batchtune.twin.replicas import Failing, MeasuredRates, Replicas, held_to, long_run
from batchtune.twin.simulator.simulate import Routing, batcher_of, left_out
from batchtune.twin.traffic import Traffic, lengths_of, traffic_of
from batchtune.twin.twin import Twin
from batchtune.units import counted, parse_ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """A run with the twin (simulator of its server) that was calibrated from its trials.

    `base`: the configuration that `--set` starts from. `base_name`: where it comes from, such as "the
    recommended configuration".
    """

    run: Run
    scenario: Scenario
    trials: Sequence[Trial]
    twin: Twin
    base: Configuration
    base_name: str

    def measured(self, configuration: Configuration, *, slo: SloSpec | None = None) -> MeasuredRates | None:
        """Return the highest rate at which a configuration met the SLO and the lowest at which it missed it; `slo`
        None: the scenario's.

        None: nothing was measured; only closed loops were, and none missed; or the load's rate changes over time.
        """
        capacity = capacity_of(configuration, self.trials, scenario=self.scenario, slo=slo)
        if capacity is None or traffic_of(self.scenario).changes:
            return None
        held_rps, missed_rps = capacity.held_rps, capacity.missed_rps
        if not capacity.by_loops:
            return MeasuredRates(
                held_rps=held_rps,
                missed_rps=missed_rps,
                is_share=capacity.is_share,
                is_bound=capacity.is_bound,
                doubtful_rps=capacity.doubtful_rps,
                missed_runs=capacity.missed_higher + (capacity.missed if held_rps else 0),
            )
        says_missed = (missed_rps or 0.0) > held_rps  # what loops kept is no rate that was held
        return MeasuredRates(held_rps=0.0, missed_rps=missed_rps) if says_missed else None


def modelled(run: Run) -> Scenario:
    """Return the scenario of a run that the twin can simulate.

    Raises:
        TwinError: the run is of a kind that the twin does not know; the hint says what helps.
        ArchiveError, ScenarioError: the run cannot be read.
    """
    scenario = run.scenario()
    if scenario.target.models or not scenario.sizes_batches:
        whose = "several models" if scenario.target.models else "a server that batches continuously"
        hint = "name the run of a sweep of one model; `batchtune load` measures any other"
        if scenario.streams:
            hint = "plan and simulate do not work for it; `batchtune load` with --rate measures other rates"
        if not scenario.target.models and not scenario.streams:
            whose = "a server of kind http without target.means.rows"
            hint = "add means: {rows: PARAMETER} to target, with the parameter for the rows of a batch; then sweep"
        raise TwinError(f"{run.path} is of {whose}, which the simulator does not support", hint=hint)
    return scenario


def calibrated_run(run: Run, *, quiet: bool, slo: SloSpec | None = None) -> Calibrated:
    """Calibrate the twin from the trials of a run.

    `base` of the result is the configuration that `recommend` chooses for `slo` (None: the scenario's); where there is
    none, what it chooses for the scenario's SLO; else the scenario's own configuration.

    Raises:
        TwinError: as `modelled`, or no trial can be used; the hint says what helps.
        ArchiveError, ScenarioError: the run cannot be read.
    """
    scenario, trials = modelled(run), kept_trials(run)
    measured = [
        trial
        for trial in without_superseded(trials)
        if trial.measurement is not None and _says_rows(trial.configuration)
    ]
    if not measured:
        raise TwinError(
            f"{run.path} has no measured trial with known parameters to calibrate the simulator",
            hint="`batchtune sweep SCENARIO.yaml` measures some; --set search.budget.time=30s is enough",
        )
    with note_when_slow(
        f"calibrating the simulator from {counted(len(measured), 'trial')} of {run.path}", quiet=quiet
    ):
        twin = calibrate(
            [
                observation_of(trial.configuration, trial.measurement, scenario)
                for trial in measured
                if trial.measurement
            ]
        )
    chosen = _recommended(trials, scenario, slo) or _recommended(trials, scenario)
    base, base_name = scenario.configuration({}), "the scenario's own configuration"
    if chosen is not None:
        base, base_name = chosen.configuration, "the recommended configuration"
    return Calibrated(run=run, scenario=scenario, trials=trials, twin=twin, base=base, base_name=base_name)


def _says_rows(configuration: Configuration) -> bool:
    """Whether the rows of a batch are bounded by a known parameter, or by a default that is documented."""
    batching = configuration.batching
    own_default = configuration.dialect == "http" and batching is not None and batching.max_batch_size is None
    return configuration.known and not own_default


def asked_values(settings: Sequence[str], *, words: Sequence[ServerWord] = ()) -> dict[str, list[Any]]:
    """Parse the texts of --set, `KEY=VALUE[,VALUE…]`, into parameter -> values; those of a repeated key are
    joined.

    `words`: the parameters of a server of kind http by its own names and units; () of any other.

    Raises:
        UsageError: an unknown parameter, a value of another type, or more than 500 combinations.
    """
    choices: dict[str, list[Any]] = {}
    for name, values in (_choices(text, words) for text in settings):
        choices[name] = list(dict.fromkeys([*choices.get(name, ()), *values]))
    combinations = math.prod(map(len, choices.values()))
    most_configurations = 500
    if combinations > most_configurations:
        raise UsageError(
            f"--set asks for {combinations:,} configurations; at most {most_configurations}",
            hint="give fewer values",
        )
    return choices


def asked_configurations(
    base: Configuration, choices: Mapping[str, list[Any]], *, by_length: bool = True
) -> list[Configuration]:
    """Return every combination of the values, each as the base configuration with these values.

    `choices`: parameter -> values. `by_length`: the server can group requests by length.

    Raises:
        UsageError: a parameter that the server does not have.
        BatchingParametersError: a combination that no server would take.
    """
    for name in choices:
        if base.dialect == "triton" and name in MISSING:
            raise UsageError(f"--set {name}: Triton has no such parameter", hint=MISSING[name])
        if name == LENGTH_BUCKETS and (base.dialect == "triton" or not by_length):
            raise UsageError(
                f"--set {name}: only the bundled server groups requests by length", hint="leave it out"
            )
    if base.batching is None and not choices:
        return [base]
    flags = dict(base.flags)
    values = {} if base.batching is None else to_dict(base.batching)
    if base.dialect == "http" and base.instances_flag in flags:
        values[base.instances_flag] = int(flags.pop(base.instances_flag))
    configurations = []
    for combination in itertools.product(*choices.values()):
        point = dict(zip(choices, combination, strict=True))
        if base.batching is None and point.keys() - {"enable_batching"}:
            point.setdefault("enable_batching", True)
        kept = _without_stale_sizes(values, point)
        if base.dialect == "http":
            configurations.append(http_configuration(flags, kept, point, words=base.words))
            continue
        asked = configuration_of(kept, point, searched=())
        own = tuple(flag for flag in base.flags if flag[0] != LENGTH_BUCKETS or LENGTH_BUCKETS not in point)
        configurations.append(replace(base, batching=asked.batching, flags=(*own, *asked.flags)))
    return list(dict.fromkeys(configurations))


def _recommended(
    trials: Sequence[Trial], scenario: Scenario, slo: SloSpec | None = None
) -> Recommendation | None:
    """Return what the trials recommend for `slo` (None: the scenario's); None for a comparison, a load test, or a run
    without a recommendation."""
    if any(trial.source in ("variant", "load") for trial in trials):
        return None
    try:
        return recommend(trials, scenario=scenario, slo=slo)
    except NO_ANSWER:
        return None


def notes_on(configurations: Sequence[Configuration]) -> list[str]:
    """Return a sentence on each thing that servers with these configurations do and the twin does not
    simulate."""
    return [
        f"{text}." for text in dict.fromkeys(text for asked in configurations for text in left_out(asked))
    ]


def notes_on_lengths(calibrated: Calibrated) -> list[str]:
    """Return a sentence on each thing that the twin does not know about requests of different lengths."""
    request, flags = calibrated.scenario.request, calibrated.scenario.target.flags
    notes = []
    if any(name.lstrip("-") == LENGTH_BUCKETS for name in flags):
        notes.append("The length buckets of target.flags are not simulated: one queue is.")
    if not any(kind.lengths is not None for kind in request.kinds()):
        return notes
    if not lengths_of(request):
        notes.append(
            "The requests' lengths are not known (kinds with lengths of their own, or a file that cannot be read): all "
            "are simulated as equally long."
        )
    elif calibrated.twin.best_fit.length is None:
        notes.append(
            "What the length of a request costs is not known: the trials' batches were about equally long, or the "
            "server did not report them."
        )
    return notes


def _choices(text: str, words: Sequence[ServerWord]) -> tuple[str, list[Any]]:
    """Parse one text of --set; return (parameter, values), by our names and in our units.

    Raises:
        UsageError: no KEY=VALUE, or a parameter or value that cannot be simulated.
    """
    word, equals, given = text.partition("=")
    word = word.strip()
    if not equals or not given.strip():
        example = next((f"{own}=8,16" for _, own, _ in words), "max_batch_size=16,32,64")
        raise UsageError(f"--set {text}: expected KEY=VALUE", hint=f"for instance --set {example}")
    name, units = _in_house(word, words)
    if name in SETTINGS:
        raise UsageError(f"--set {name}: the simulator lacks it", hint="`batchtune sweep` measures it")
    if name == LENGTH_BUCKETS:
        return name, [given]
    if name == "allowed_batch_sizes":
        return name, [tuple(_value(name, size) for size in given.split(","))]
    return name, [_value(name, value, word=word, units=units) for value in given.split(",")]


def _in_house(word: str, words: Sequence[ServerWord]) -> tuple[str, int]:
    """Return our name for a parameter, and how many of our units one of the given values is.

    Raises:
        UsageError: the simulator, or a server with these words, has no such parameter.
    """
    own = {theirs: (ours, units) for ours, theirs, units in words}
    if word in own:
        return own[word]
    name = {theirs: ours for ours, theirs in WORDS.items()}.get(word, word)
    if words and name not in {"enable_batching", *(ours for ours, _, _ in words)}:
        raise UsageError(
            f"--set {word}: none of the parameters in target.means", hint=did_you_mean(word, tuple(own))
        )
    if name not in (*KNOBS, *SETTINGS, LENGTH_BUCKETS):
        raise UsageError(f"--set {name}: no batching parameter", hint=did_you_mean(name, KNOBS))
    return name, 1


def _value(name: str, text: str, *, word: str = "", units: int = 1) -> Any:
    """Parse one value of a parameter: true or false, a thread pool's name, else a number within the parameter's range.

    `word`: the name that was given for it. `units`: how many of our units one of the given is; from 2 on parts of one
    may be given.

    Raises:
        UsageError: it is none.
    """
    text, word = text.strip(), word or name
    if text in ("true", "false"):
        return text == "true"
    if name == "thread_pool_name":
        return text
    try:
        number = int(text) if units == 1 else round(float(text) * units)
    except (ValueError, OverflowError) as error:
        hint = "timeouts are in microseconds: 2000 is 2 ms" if word == name else ""
        raise UsageError(
            f"--set {word}: {text!r} is not a {'whole ' if units == 1 else ''}number", hint=hint
        ) from error
    int64_max = 2**63 - 1
    least = 0 if name in ("batch_timeout_micros", "max_enqueued_batches") else -int64_max
    most = int64_max
    if name in ("max_batch_size", "max_execution_batch_size", "allowed_batch_sizes"):
        # The simulator holds a time for each number of rows: 0.8 MB for each of the twin's readings.
        least, most = 1, 100_000
    elif name == "num_batch_threads":
        least, most = 1, 10_000
    if not least <= number <= most:
        upper = "" if most == int64_max else f" to {most:,}"
        raise UsageError(
            f"--set {word}={text}: out of its range", hint=f"give a whole number from {least}{upper}"
        )
    return number


def _without_stale_sizes(values: Mapping[str, Any], point: Mapping[str, Any]) -> dict[str, Any]:
    """Return the base's values without the batch sizes that belong to its max_batch_size, where `point` has
    another."""
    stale = {"allowed_batch_sizes", "max_execution_batch_size"} if "max_batch_size" in point else set()
    return {name: value for name, value in values.items() if name in PARAMETER_NAMES and name not in stale}


# `batchtune simulate`: what the server would do with other parameters, or under another load.


def run_simulate(
    path: Path | None,
    *,
    settings: Sequence[str],
    rate: str | None,
    concurrency: str | None,
    results: Path,
    json: bool,
    quiet: bool,
) -> int:
    """Run `batchtune simulate`. Returns the exit code: 0, or 5 where the twin's predictions are too
    inaccurate.

    Raises:
        UsageError: options that cannot be parsed or give too many points.
        ArchiveError, TwinError: as `asked_run` and `calibrated_run`.
    """
    loads, run = points_of(rate=rate, concurrency=concurrency), asked_run(path, results=results)
    choices = asked_values(settings, words=run.scenario().target.words)
    calibrated = calibrated_run(run, quiet=quiet)
    by_length = calibrated.scenario.target.runs == "bundled"
    configurations = asked_configurations(calibrated.base, choices, by_length=by_length)
    traffics, notes = _traffics(calibrated, loads)
    notes += [*notes_on(configurations), *notes_on_lengths(calibrated)]
    most_points = 2_000
    if len(configurations) * len(traffics) > most_points:
        raise UsageError(
            f"{len(configurations)} configurations under {len(traffics)} loads are more than {most_points} points",
            hint="give fewer values",
        )
    with note_when_slow(f"simulating {counted(len(configurations) * len(traffics), 'point')}", quiet=quiet):
        points = [
            point
            for configuration in configurations
            for point in _points(calibrated, configuration, traffics)
        ]
    if json:
        print_json({**_document(calibrated, points), "notes": [*twin_text.doubts(calibrated.twin), *notes]})
    else:
        twin_text.print_simulations(
            points, calibrated.twin, base=calibrated.base_name, run=calibrated.run.path, notes=notes
        )
    return trusted(calibrated.twin)


def trusted(twin: Twin) -> int:
    """Return the exit code of an answer that the twin computed: 0, or 5 with a warning on stderr where its
    predictions are too inaccurate."""
    if twin.reliable:
        return 0
    print("warning: the simulator is too inaccurate for this server", file=sys.stderr)
    return InconclusiveError.exit_code


def _points(
    calibrated: Calibrated, configuration: Configuration, traffics: Sequence[Traffic]
) -> Iterator[Simulated]:
    """Yield the prediction for a configuration under each load.

    Under an open loop with a steady rate, a configuration with measured rates is predicted by a twin that is
    scaled to agree with them.
    """
    scenario = calibrated.scenario
    batcher = batcher_of(configuration, cpus=scenario.target.cpus)
    steady = [traffic for traffic in traffics if not (traffic.closed or traffic.changes)]
    measured = calibrated.measured(configuration) if steady else None
    twin, twin_rps = calibrated.twin, None
    if measured is not None:
        limits, errors = limits_of(scenario.slo), scenario.slo.error_ratio
        twin, twin_rps = held_to(twin, batcher, steady[0], limits, errors, measured)
    for traffic in traffics:
        asked_twin = twin if traffic in steady else calibrated.twin
        yield Simulated(
            configuration=configuration,
            traffic=traffic,
            prediction=long_run(asked_twin.predict(batcher, traffic), asked_twin, batcher, traffic),
            measured=measured if traffic in steady else None,
            twin_rps=twin_rps if traffic in steady else None,
        )


def _traffics(
    calibrated: Calibrated, loads: Sequence[tuple[float | None, int | None]]
) -> tuple[list[Traffic], list[str]]:
    """Return (loads to simulate, sentences on where they come from); `loads`: (rate in requests/s, clients),
    one of the two None.

    Raises:
        UsageError: no rate is known.
    """
    scenario = calibrated.scenario
    traffics = [traffic_of(scenario, rate_rps=rate_rps, concurrency=clients) for rate_rps, clients in loads]
    own = traffics[0]
    if own.clients is None and own.rate_rps is None and scenario.load.rate_is_missing():
        capacity = capacity_of(calibrated.base, calibrated.trials, scenario=scenario)
        if capacity is None or not capacity.held_rps > 0.0:
            raise UsageError(
                "the scenario names no rate, and the run found no capacity to start from",
                hint="give --rate 500, or --rate 100:1k:100",
            )
        note = f"The rate is the capacity that the run found for {calibrated.base_name}; --rate asks for another."
        return [own.at(capacity.held_rps)], [note]
    return traffics, []


def _document(calibrated: Calibrated, points: list[Simulated]) -> dict[str, Any]:
    return {
        "run": str(calibrated.run.path),
        "twin": twin_document(calibrated),
        "points": [
            {
                "label": point.configuration.label(),
                "configuration": worded(point.configuration.to_dict()),
                "traffic": point.traffic.to_dict(),
                **worded(point.prediction.to_dict()),
                "measured": to_plain(point.measured),
                "twin_rps": to_plain(point.twin_rps),
            }
            for point in points
        ],
    }


def twin_document(calibrated: Calibrated) -> dict[str, Any]:
    """Return the facts on the twin for --json, name -> value: how accurate it is, and from how many trials it
    was calibrated."""
    twin = calibrated.twin
    return {
        "reliable": twin.reliable,
        "accuracy": twin_text.accuracy_text(twin),
        "error": to_plain(twin.error),
        "observations": twin.observations,
        "rows_max": twin.rows_max,
        "threads_max": twin.threads_max,
        "best": to_plain(twin.best_fit),
    }


# `batchtune plan`: the replicas that a rate needs within its latency limits.


def failing_of(failing: str | None) -> Failing | None:
    """Parse the text of --failing, `N` or `N%`, into how many replicas may be down at once; None for None.

    Raises:
        UsageError: no number of replicas and no share of them.
    """
    if failing is None:
        return None
    text, hint = failing.strip(), "write --failing 1 for one replica, or --failing 5% of the fleet"
    if text.endswith("%"):
        with of_option("--failing", hint=hint):
            share = parse_ratio(text)
        if not 0.0 < share < 1.0:
            raise UsageError(f"--failing {text}: expected more than 0 % and less than 100 %", hint=hint)
        return Failing(count=0, share=share)
    if not text.isdecimal() or not 1 <= int(text) <= 1_000_000:
        raise UsageError(f"--failing {text}: expected replicas (1 or more) or a percentage", hint=hint)
    return Failing(count=int(text), share=0.0)


def run_plan(
    path: Path | None,
    *,
    rate: str | None,
    limits: Mapping[str, str | None],
    settings: Sequence[str],
    routing: Routing,
    failing: str | None,
    results: Path,
    json: bool,
    quiet: bool,
) -> int:
    """Run `batchtune plan`. Returns the exit code: 0, or 5 where the twin is too inaccurate, or where no run with these
    parameters met the limits and the twin predicts that they do.

    Raises:
        UsageError: no rate, no latency limit, several configurations, or options that cannot be parsed.
        ArchiveError, TwinError: as `asked_run`, `calibrated_run` and `Replicas.plan`.
    """
    if rate is None:
        raise UsageError("a plan needs a rate", hint="write --rate 10000, or 10k/s")
    refuse_range(rate=rate, concurrency=None)
    (rate_rps,), down = rates_rps(rate), failing_of(failing)
    promises, run = promised(limits), asked_run(path, results=results)
    scenario = modelled(run)
    choices, slo = asked_values(settings, words=scenario.target.words), in_place_of(scenario, promises)
    if not slo.limits():
        raise UsageError("the scenario has no latency limit", hint="give --slo-p95 20ms")
    calibrated = calibrated_run(run, quiet=quiet, slo=slo)
    by_length = scenario.target.runs == "bundled"
    configurations = asked_configurations(calibrated.base, choices, by_length=by_length)
    if len(configurations) != 1:
        raise UsageError(
            f"--set asks for {len(configurations)} configurations; a plan is for one",
            hint="compare them with `batchtune simulate`, then plan with the best",
        )
    fleet = Replicas(
        calibrated.twin,
        batcher_of(configurations[0], cpus=scenario.target.cpus),
        traffic_of(scenario, rate_rps=rate_rps),
        limits_of(slo),
        slo.error_ratio,
        routing,
        down,
        measured=calibrated.measured(configurations[0], slo=slo),
    )
    with note_when_slow(f"simulating replicas for {rate_rps:,.0f} requests/s", quiet=quiet):
        plan = fleet.plan(rate_rps)
    notes = [*notes_on(configurations), *notes_on_lengths(calibrated)]
    plan = replace(plan, notes=(*plan.notes, *(as_text(note.rstrip(".")) for note in notes)))
    if json:
        document = {
            "run": str(calibrated.run.path),
            "label": configurations[0].label(),
            "configuration": worded(configurations[0].to_dict()),
            "twin": twin_document(calibrated),
            **worded(plan.to_dict()),
        }
        print_json(document)
    else:
        twin_text.print_plan(plan, calibrated.twin, configuration=configurations[0], run=calibrated.run.path)
    code = trusted(calibrated.twin)
    if plan.measured is not None and not plan.measured.held_rps and plan.contradicted:
        print("warning: no run with these parameters met the limits: sweep with them", file=sys.stderr)
        return InconclusiveError.exit_code
    return code
