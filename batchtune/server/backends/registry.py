"""Chooses the backend of a version by the files in its directory.

`saved_model.pb`: TensorFlow; `model.onnx`: ONNX Runtime; `model.pt2`, `model.pt`: PyTorch; `emulated.yaml`: a
device that is emulated by its service time. A framework is imported only for its own file.
"""

from __future__ import annotations

from pathlib import Path

from batchtune.server.backends.model import LoadedModel
from batchtune.server.server_flags import ServerFlags
from batchtune.wire.status import StatusError


def load_model(version_directory: Path, options: ServerFlags) -> LoadedModel:
    """Load the model of a version directory with the backend that its files call for; of several the first of
    emulated.yaml, a SavedModel, ONNX and PyTorch.

    Raises:
        StatusError: NOT_FOUND without a known model file, UNIMPLEMENTED for a pipeline.yaml; else the backend's error.
    """
    if (version_directory / "emulated.yaml").is_file():
        from batchtune.server.backends.emulated import load_emulated_model

        return load_emulated_model(version_directory)
    if (version_directory / "saved_model.pb").is_file() or (
        version_directory / "saved_model.pbtxt"
    ).is_file():
        from batchtune.server.backends.tensorflow import load_saved_model

        return load_saved_model(version_directory, options)
    if (version_directory / "model.onnx").is_file():
        from batchtune.server.backends.onnx import load_onnx_model

        return load_onnx_model(version_directory, options)
    if (version_directory / "model.pt2").is_file() or (version_directory / "model.pt").is_file():
        from batchtune.server.backends.torch.loading import load_torch_model

        return load_torch_model(version_directory, options)
    if (version_directory / "pipeline.yaml").is_file():
        raise StatusError(
            "UNIMPLEMENTED",
            f"{version_directory}/pipeline.yaml: chains of models no longer exist: serve the models by "
            "--model_config_file and ask them in turn",
        )
    raise StatusError(
        "NOT_FOUND",
        "Could not find a model: none of saved_model.pb, model.onnx, model.pt2, model.pt, emulated.yaml is in "
        f"{version_directory}",
    )
