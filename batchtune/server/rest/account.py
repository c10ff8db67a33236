"""What does the REST API tell of a model: the states of its versions, and what it takes and gives?"""

from __future__ import annotations

import json

from batchtune.server.calls.contract import Models
from batchtune.server.rest.routes import Route
from batchtune.wire.status import StatusError
from batchtune.wire.tfserving.messages import SignatureDefMap


def status_answer(models: Models, route: Route) -> bytes:
    """The states of a model's versions; a label is ignored, as TensorFlow Serving does."""
    _require_model_name(route)
    document = {
        "model_version_status": [
            {
                "version": str(state.version),
                "state": state.state,
                "status": {"error_code": state.error_code, "error_message": state.error_message},
            }
            for state in models.statuses(route.model_name, version=route.version)
        ]
    }
    return json.dumps(document, indent=1).encode() + b"\n"


def metadata_answer(models: Models, route: Route) -> bytes:
    """The signatures of a model, as protobuf's JSON of a SignatureDefMap."""
    from google.protobuf.json_format import MessageToDict

    _require_model_name(route)
    servable = models.find(route.model_name, version=route.version, label=route.label)
    signatures = MessageToDict(
        SignatureDefMap.FromString(servable.metadata),
        preserving_proto_field_name=True,
        always_print_fields_with_no_presence=True,
    )
    document = {
        "model_spec": {
            "name": servable.name,
            "signature_name": "",
            "version": str(servable.version),
        },
        "metadata": {"signature_def": signatures},
    }
    return json.dumps(document, indent=1).encode() + b"\n"


def _require_model_name(route: Route) -> None:
    if not route.model_name:
        raise StatusError("INVALID_ARGUMENT", "Missing model name in request.")
