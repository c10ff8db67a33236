"""How does one loaded version of a chain take requests?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from batchtune.server.backends.declared_tensors import did_you_mean
from batchtune.server.backends.model import PREDICT_METHOD
from batchtune.server.log import warn
from batchtune.server.metrics.chain_use import ChainUse
from batchtune.server.models.chains.pipeline import PIPELINE_FILE, Pipeline
from batchtune.server.models.chains.pipeline_file import read_pipeline
from batchtune.server.models.chains.plan import MisfitError, PlannedStep, padded_outputs, plan
from batchtune.server.models.chains.run import ChainRequest, Route
from batchtune.server.models.loaded import Holds, LoadedVersion
from batchtune.server.models.servable import metadata_of
from batchtune.server.sessions.input_shapes import SignatureInputs, listed
from batchtune.server.sessions.request import Deliver, Done, Queued
from batchtune.server.stages.stages_file import STAGES_FILE
from batchtune.wire.signature import DEFAULT_SIGNATURE, Signature
from batchtune.wire.status import StatusError

Find = Callable[[str], LoadedVersion]
"""The version of a model that is asked where none is named; raises StatusError NOT_FOUND."""


class Chain:
    """One version of a chain, with the signature serving_default; a LoadedVersion.

    Its models are found when a request comes, and each has one version for the whole request.
    """

    def __init__(
        self, pipeline: Pipeline, *, name: str, version: int, find: Find, use: ChainUse, deliver: Deliver
    ) -> None:
        self.name = name
        self.version = version
        self.holds = Holds()
        signature = Signature(
            name=DEFAULT_SIGNATURE,
            method_name=PREDICT_METHOD,
            inputs=pipeline.inputs,
            outputs=pipeline.outputs,
        )
        self.signatures: Mapping[str, Signature] = {DEFAULT_SIGNATURE: signature}
        self.metadata = metadata_of(self.signatures)
        self._pipeline = pipeline
        self._find = find
        self._deliver = deliver
        self._uses = {step.name: use.step(name, step.name) for step in pipeline.steps}
        self._models = tuple(dict.fromkeys(step.model for step in pipeline.steps))
        self._inputs = SignatureInputs(signature)
        self._route: Route | None = None

    def submit(
        self,
        signature_name: str,
        inputs: dict[str, NDArray[Any]],
        output_names: tuple[str, ...] | None,
        deadline_ns: int | None,
        done: Done,
    ) -> Queued | None:
        """Ask the first step; on the event loop. `done` follows there. Every step is asked, whatever outputs are.

        Raises:
            StatusError: refused at once: wrong tensors, a model without a version, or what its first step says.
        """
        if signature_name != DEFAULT_SIGNATURE:
            raise StatusError("FAILED_PRECONDITION", f'Serving signature key "{signature_name}" not found.')
        rows = self._inputs.count_rows(inputs)
        sources = self._pipeline.sources
        if output_names is not None:
            sources = {name: sources[name] for name in output_names}
        request = ChainRequest(self._present_route(), inputs, rows, sources, deadline_ns, done)
        outputs = request.advance()
        if outputs is None:
            return request
        self._deliver([(done, outputs, None)])
        return None

    def summary(self) -> str:
        """What it takes and gives, and whom it asks, in a line."""
        signature = self.signatures[DEFAULT_SIGNATURE]
        steps = " -> ".join(f"{step.name} ({step.model})" for step in self._pipeline.steps)
        return (
            f"{DEFAULT_SIGNATURE}({listed(signature.inputs)}) -> ({listed(signature.outputs)}); chain {steps}"
        )

    def pads_lengths(self, signature_name: str) -> bool:  # noqa: ARG002 a LoadedVersion's
        """A chain has no batches of its own."""
        return False

    def close(self) -> None:
        """Let go of the versions asked last; no request may be under way."""
        self._route = None

    def check(self, configured: Sequence[str]) -> None:
        """Look whether the models are configured, and fit where they have a version; one that has none is told of, and
        outputs that are padded with the batches of their model.

        Raises:
            StatusError: INVALID_ARGUMENT naming file, line and key.
        """
        fault = self._pipeline.file.fault
        for step in self._pipeline.steps:
            key = f"steps.{step.name}.model"
            if step.model not in configured:
                names = ", ".join(sorted(set(configured) - {self.name}))
                guess = did_you_mean(step.model, configured)
                raise fault(f"{key}: this server has no model {step.model}{guess}; it has {names}")
            if step.model == self.name:
                raise fault(f"{key}: {step.model} is this chain; expected a model")
        try:
            versions = self._present_versions()
            self._planned(versions)
        except MisfitError as misfit:
            raise fault(str(misfit)) from misfit
        except StatusError as error:
            warn(f"model {self.name} version {self.version} cannot answer yet: {error.message}")
            return
        for source in padded_outputs(self._pipeline, versions):
            warn(
                f"model {self.name} version {self.version}: {source} may be as long as the longest request of its "
                "batch, since its model pads lengths, and then fits no tensor of the request's own length; give that "
                "model outputs of a fixed length, or no padding and no length buckets"
            )

    def _present_route(self) -> Route:
        """The route through the versions that answer now; made anew when one of them is another.

        Raises:
            StatusError: NOT_FOUND where a model has no version, FAILED_PRECONDITION where a version does not fit.
        """
        versions = self._present_versions()
        route = self._route
        if route is None or any(route.versions[name] is not present for name, present in versions.items()):
            try:
                steps = self._planned(versions)
            except MisfitError as misfit:
                raise StatusError(
                    "FAILED_PRECONDITION", f"the models do not fit the chain: {misfit}"
                ) from misfit
            held = (self, *versions.values())
            route = self._route = Route(steps=steps, versions=versions, uses=self._uses, held=held)
        return route

    def _present_versions(self) -> dict[str, LoadedVersion]:
        versions = {}
        for name in self._models:
            try:
                versions[name] = self._find(name)
            except StatusError as error:
                step = next(step.name for step in self._pipeline.steps if step.model == name)
                raise StatusError(error.code, f"step {step}: {error.message}") from error
        return versions

    def _planned(self, versions: Mapping[str, LoadedVersion]) -> tuple[PlannedStep, ...]:
        for step in self._pipeline.steps:
            if isinstance(versions[step.model], Chain):
                raise MisfitError(
                    f"steps.{step.name}.model", f"{step.model} is a chain itself; expected a model"
                )
        return plan(self._pipeline, versions)


def open_chain(
    name: str,
    version: int,
    directory: Path,
    *,
    find: Find,
    configured: Sequence[str],
    use: ChainUse,
    deliver: Deliver,
) -> Chain:
    """The chain that a version directory's `pipeline.yaml` declares, of the models that are `configured`.

    Raises:
        StatusError: INVALID_ARGUMENT naming file, line and key, or a stages.yaml beside, which no chain reads.
    """
    path, stages = directory / PIPELINE_FILE, directory / STAGES_FILE
    if stages.is_file():
        message = (
            f"{stages}: not read beside {path}, which declares a chain; "
            "expected it in the version folder of a model that a step asks, or not at all"
        )
        raise StatusError("INVALID_ARGUMENT", message)
    pipeline = read_pipeline(path)
    chain = Chain(pipeline, name=name, version=version, find=find, use=use, deliver=deliver)
    chain.check(configured)
    return chain
