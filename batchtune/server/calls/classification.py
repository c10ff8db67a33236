"""Classify and Regress: checks of signatures, outputs as result messages.

Texts and order of checks are TensorFlow Serving's (servables/tensorflow/classifier.cc, regressor.cc, util.cc).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from batchtune.wire.signature import DEFAULT_SIGNATURE, Signature
from batchtune.wire.status import invalid_argument
from batchtune.wire.tfserving.messages import (
    ClassificationRequest,
    ClassificationResponse,
    ClassificationResult,
    RegressionRequest,
    RegressionResponse,
    RegressionResult,
)
from batchtune.wire.tfserving.tensors import signature_to_def

CLASSIFY_METHOD = "tensorflow/serving/classify"
REGRESS_METHOD = "tensorflow/serving/regress"


def classification_outputs(signature: Signature, *, check_method: bool) -> tuple[str, ...]:
    """Check that a signature can classify; return the names of its outputs to compute: ("classes",), ("scores",) or
    both.

    check_method: whether the method name must be CLASSIFY_METHOD (--enable_signature_method_name_check).

    Raises:
        StatusError: INVALID_ARGUMENT when the signature cannot classify.
    """
    _check_call(signature, "classification", CLASSIFY_METHOD if check_method else "")
    if len(signature.outputs) not in {1, 2}:
        raise invalid_argument(f"Expected one or two output Tensors, found {len(signature.outputs)}")
    if signature.inputs[0].name != "inputs":
        raise invalid_argument(f"No classification inputs found in SignatureDef: {_debug(signature)}")
    outputs = [spec.name for spec in signature.outputs if spec.name in {"classes", "scores"}]
    if not outputs:
        raise invalid_argument(
            "Expected classification signature outputs to contain at least one of "
            f'"classes" or "scores". Signature was: {_debug(signature)}'
        )
    return tuple(outputs)


def regression_outputs(signature: Signature, *, check_method: bool) -> tuple[str, ...]:
    """Check that a signature can regress; return the names of its outputs to compute: ("outputs",).

    check_method: whether the method name must be REGRESS_METHOD (--enable_signature_method_name_check).

    Raises:
        StatusError: INVALID_ARGUMENT when the signature cannot regress.
    """
    _check_call(signature, "regression", REGRESS_METHOD if check_method else "")
    if len(signature.outputs) != 1:
        raise invalid_argument("Expected one output Tensor.")
    if signature.inputs[0].name != "inputs":
        raise invalid_argument(f"No regression inputs found in SignatureDef: {_debug(signature)}")
    if signature.outputs[0].name != "outputs":
        raise invalid_argument(f"No regression outputs found in SignatureDef: {_debug(signature)}")
    return ("outputs",)


def classification_result(outputs: Mapping[str, NDArray[Any]], examples: int) -> Any:
    """Build a ClassificationResult for `examples` examples from the model's "classes" and "scores".

    Raises StatusError INVALID_ARGUMENT where their shapes or dtypes are not a classification's.
    """
    classes, scores = outputs.get("classes"), outputs.get("scores")
    for name, tensor, kind, wanted in (
        ("classes", classes, "O", "DT_STRING"),
        ("scores", scores, "f", "DT_FLOAT"),
    ):
        if tensor is None:
            continue
        if tensor.ndim != 2:
            raise invalid_argument(
                f"Expected Tensor shape: [batch_size num_classes] but got {_shape(tensor)}"
            )
        if tensor.dtype.kind != kind or (kind == "f" and tensor.dtype != np.float32):
            raise invalid_argument(f"Expected {name} Tensor of {wanted}. Got: {_type(tensor)}")
        if len(tensor) != examples:
            raise invalid_argument(f"Expected {name} output batch size of {examples}. Got: {len(tensor)}")
    if classes is not None and scores is not None and classes.shape[1] != scores.shape[1]:
        raise invalid_argument(
            "Tensors class and score should match in dim_size(1). "
            f"Got {classes.shape[1]} vs. {scores.shape[1]}"
        )
    result = ClassificationResult()
    given = classes if classes is not None else scores
    width = 0 if given is None else given.shape[1]
    for row in range(examples):
        entry = result.classifications.add()
        for column in range(width):
            scored = entry.classes.add()
            if classes is not None:
                scored.label = classes[row, column].decode("utf-8", "replace")
            if scores is not None:
                scored.score = float(scores[row, column])
    return result


def regression_result(outputs: Mapping[str, NDArray[Any]], examples: int) -> Any:
    """Build a RegressionResult for `examples` examples from the model's "outputs".

    Raises StatusError INVALID_ARGUMENT where shape or dtype is not a regression's.
    """
    tensor = outputs["outputs"]
    if tensor.ndim != 1 and not (tensor.ndim == 2 and tensor.shape[1] == 1):
        raise invalid_argument(
            f"Expected output Tensor shape to be either [batch_size] or [batch_size, 1] but got {_shape(tensor)}"
        )
    if len(tensor) != examples:
        raise invalid_argument(
            f"Input batch size did not match output batch size: {examples} vs. {len(tensor)}"
        )
    if tensor.dtype != np.float32:
        raise invalid_argument(f"Expected output Tensor of DT_FLOAT.  Got: {_type(tensor)}")
    result = RegressionResult()
    for value in tensor.ravel().tolist():
        result.regressions.add(value=value)
    return result


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """The parts in which Classify and Regress differ.

    api: TensorFlow Serving's name of the call; request, response: its message classes; result_field: field of
    a MultiInference result; outputs: `classification_outputs` or `regression_outputs`; result:
    `classification_result` or `regression_result`.
    """

    api: str
    request: Any
    response: Any
    result_field: str
    outputs: Callable[..., tuple[str, ...]]
    result: Callable[[Mapping[str, NDArray[Any]], int], Any]

    def called(
        self, signatures: Mapping[str, Signature], name: str, *, check_method: bool
    ) -> tuple[Signature, tuple[str, ...]]:
        """Return (signature, names of its outputs to compute) of a call on signature `name`; "": the default one.

        Raises:
            StatusError: INVALID_ARGUMENT where there is none, or as `outputs`.
        """
        name = name or DEFAULT_SIGNATURE
        if name not in signatures:
            raise invalid_argument(f"No signature was found with the name: {name}")
        return signatures[name], self.outputs(signatures[name], check_method=check_method)


CLASSIFY = Kind(
    api="Classify",
    request=ClassificationRequest,
    response=ClassificationResponse,
    result_field="classification_result",
    outputs=classification_outputs,
    result=classification_result,
)
REGRESS = Kind(
    api="Regress",
    request=RegressionRequest,
    response=RegressionResponse,
    result_field="regression_result",
    outputs=regression_outputs,
    result=regression_result,
)


def _check_call(signature: Signature, kind: str, method: str) -> None:
    """Raise StatusError unless a signature has one input and this method name; "": any."""
    if method and signature.method_name != method:
        raise invalid_argument(
            f"Expected {kind} signature method_name to be {method}. Was: {signature.method_name}"
        )
    if len(signature.inputs) != 1:
        raise invalid_argument("Expected one input Tensor.")


def _shape(tensor: NDArray[Any]) -> str:
    return f"[{','.join(map(str, tensor.shape))}]"


def _type(tensor: NDArray[Any]) -> str:
    from batchtune.wire.tfserving.tensors import datatype_name, datatype_number

    return datatype_name(datatype_number(tensor.dtype.name))


def _debug(signature: Signature) -> str:
    return str(signature_to_def(signature))
