"""What does a sweep of several models leave in its folder for a server: one file for all, and one for each model?"""

from __future__ import annotations

import json
from pathlib import Path

from batchtune.archive.deployable import BATCHING_PARAMETERS
from batchtune.archive.run import JOINT_RECOMMENDATION, Run
from batchtune.archive.whole_files import write_whole
from batchtune.batching.tfserving import format_tfserving_text
from batchtune.recommend.joint import JointRecommendation
from batchtune.target.launch.model_config import OWN_PARAMETERS, own_text


def own_file(run: Run, model: str) -> Path:
    """Where the parameters of one model lie, for each of its version directories."""
    return run.path / "models" / model / OWN_PARAMETERS


def write_joint(run: Run, recommendation: JointRecommendation) -> None:
    """Keep the recommendation, and the files that the server takes: the threads in one, the rest with each model.

    Raises:
        ArchiveError: the directory cannot be written.
    """
    document = json.dumps(recommendation.to_dict(), allow_nan=False, indent=2) + "\n"
    write_whole(run.path / JOINT_RECOMMENDATION, document.encode())
    remove_files(run)
    configuration = recommendation.configuration
    if configuration.batching is None:
        return
    write_whole(run.path / BATCHING_PARAMETERS, format_tfserving_text(configuration.batching).encode())
    for name, own in configuration.models:
        path = own_file(run, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, own_text(own).encode())


def remove_files(run: Run) -> None:
    """Drop the files of an earlier recommendation."""
    for path in (run.path / BATCHING_PARAMETERS, *(run.path / "models").glob(f"*/{OWN_PARAMETERS}")):
        path.unlink(missing_ok=True)
