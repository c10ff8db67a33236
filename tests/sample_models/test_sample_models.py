"""The sample models are what they are named after, alike on every machine, and become files that a server loads."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batchtune.errors import UsageError
from batchtune.sample_models import MODELS, cache_path, framework_for, text_stages
from batchtune.sample_models.__main__ import main
from batchtune.server.backends.registry import load_model
from batchtune.server.metrics import Metrics
from batchtune.server.server_flags import ServerFlags
from batchtune.server.stages.plan import StagePlan
from batchtune.server.stages.stages_file import read_stages_file
from batchtune.target.model_files import resolve_model
from batchtune.wire.signature import TensorSpec

torch = pytest.importorskip("torch")
torch.set_num_threads(1)  # more of them wait for each other beside the other half of the tests

from batchtune.sample_models.torch_models import FORMS, folded, torch_model, write_program  # noqa: E402

# As published: resnet50 by its authors' successors (25.56 million), text_recognition by Baek et al. 2019 (44.3 million
# in its features and classes); the transformer's is the Keras example's own count.
PARAMETERS = {"imdb_transformer": 657_758, "text_recognition": 44_282_885, "resnet50": 25_557_032}
CPU = ServerFlags(device="cpu", tensorflow_intra_op_parallelism=1)


whole = cache(torch_model)
"""Built once for those that do not change it: 44 million weights take seconds to draw."""


def rows(name: str, count: int, seed: int = 3) -> np.ndarray:
    generator = np.random.default_rng(seed)
    shape = (count, *FORMS[name].input_shape)
    if name == "imdb_transformer":
        return generator.integers(0, 20_000, shape).astype(np.float32)
    return generator.standard_normal(shape).astype(np.float32)


def answers(module: Any, given: np.ndarray) -> np.ndarray:
    with torch.inference_mode():
        return module(torch.tensor(given)).numpy()


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base path for each way of exporting the transformer, the quickest of the three."""
    folder = tmp_path_factory.mktemp("exported")
    write_program("imdb_transformer", folder / "torch" / "1")
    write_program("imdb_transformer", folder / "torchscript" / "1", torchscript=True)
    return folder


@pytest.mark.parametrize("name", sorted(PARAMETERS))
def test_a_model_is_as_large_as_published_and_folding_keeps_its_answers(name: str) -> None:
    module, given = deepcopy(whole(name)), rows(name, 2)
    assert sum(one.numel() for one in module.parameters()) == PARAMETERS[name]
    plain = answers(module, given)
    assert plain.shape == (2, *FORMS[name].output_shape)
    lean = folded(module)
    assert not [one for one in lean.modules() if isinstance(one, torch.nn.BatchNorm2d)]
    np.testing.assert_allclose(answers(lean, given), plain, rtol=1e-4, atol=1e-6)
    assert np.abs(plain[0] - plain[1]).max() > 1e-5 * np.abs(plain).max()


def test_weights_are_the_same_each_time_and_the_global_seed_is_left_alone() -> None:
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    first = torch_model("imdb_transformer").state_dict()
    assert torch.equal(torch.rand(1), expected)
    second = torch_model("imdb_transformer").state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("how", ["torch", pytest.param("torchscript", marks=pytest.mark.slow)])
def test_the_server_loads_an_export_and_answers_any_number_of_rows(exported: Path, how: str) -> None:
    model = load_model(exported / how / "1", CPU)
    signature = model.signatures["serving_default"]
    assert signature.inputs == (TensorSpec(name="tokens", dtype="float32", shape=(None, 200)),)
    assert signature.outputs == (TensorSpec(name="scores", dtype="float32", shape=(None, 2)),)
    run, plain = model.runs["serving_default"], whole("imdb_transformer")
    for count in (1, 2, 7):
        given = rows("imdb_transformer", count)
        np.testing.assert_allclose(run({"tokens": given})["scores"], answers(plain, given), rtol=1e-5)


def test_a_word_that_the_transformer_does_not_know_counts_as_the_last_one() -> None:
    module, given = whole("imdb_transformer"), rows("imdb_transformer", 1)
    given[0, :3] = (-5.0, 20_000.0, 1e9)
    known = given.copy()
    known[0, :3] = (0.0, 19_999.0, 19_999.0)
    np.testing.assert_array_equal(answers(module, given), answers(module, known))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("torchscript", [False, True])
def test_a_sequence_of_any_length_has_the_same_scores_however_far_it_is_padded(
    tmp_path: Path, torchscript: bool
) -> None:
    write_program("sequence_transformer", tmp_path / "1", torchscript=torchscript)
    model = load_model(tmp_path / "1", CPU)
    (spec,) = model.signatures["serving_default"].inputs
    assert spec == TensorSpec(name="tokens", dtype="int64", shape=(None, None))
    run = model.runs["serving_default"]
    words = np.random.default_rng(3).integers(1, 20_000, (2, 256))
    for length in (1, 7, 256):
        alone = run({"tokens": words[:1, :length].copy()})["scores"]
        together = words.copy()
        together[0, length:] = 0
        np.testing.assert_allclose(run({"tokens": together})["scores"][:1], alone, rtol=1e-4)
    assert np.isfinite(run({"tokens": np.zeros((2, 3), np.int64)})["scores"]).all()


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_text_is_looked_up_and_embedded_before_the_network_and_labelled_after_it(tmp_path: Path) -> None:
    write_program("text_classifier", tmp_path / "1", torchscript=True)
    model, declared = load_model(tmp_path / "1", CPU), read_stages_file(tmp_path / "1")
    assert declared is not None
    plan = StagePlan(declared, model, model_name="m", use=Metrics().stages, options=CPU)
    texts = np.array(["Thé cat, the CAT".encode(), b"thequick " * 100, b""], dtype=object)
    assert plan.pre is not None
    embedded = plan.pre({"text": texts}, len(texts))["embedded"]
    assert embedded.shape == (3, 200, 32)
    the, cat = embedded[1, 0], embedded[0, 1]
    np.testing.assert_array_equal(embedded[0, :4], [the, cat, the, cat])
    assert not embedded[0, 4:].any()
    assert embedded[1].any(axis=1).all()  # cut off at 200
    scores = model.runs["serving_default"](plan.for_device({"embedded": embedded}))
    assert plan.post is not None
    answer = plan.post(scores, len(texts))
    assert answer["label"].tolist() == [[b"negative", b"positive"][int(b > a)] for a, b in answer["scores"]]
    assert text_stages.tables.cache_info().currsize == 0  # the copy beside the model has its own
    plan.close()


def test_the_first_installed_framework_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    absent: set[str] = set()
    monkeypatch.setattr(
        "batchtune.sample_models.find_spec", lambda name: None if name in absent else object()
    )
    assert framework_for("imdb_transformer") == "keras"
    absent.add("tensorflow")
    assert framework_for("imdb_transformer") == "torch"
    absent.add("torch")
    assert framework_for("text_recognition") == MODELS["text_recognition"][0]


def test_frameworks_and_their_versions_have_cache_paths_of_their_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("BATCHTUNE_CACHE_DIR", str(tmp_path))
    one = cache_path("resnet50", "torch")
    assert one.name == "resnet50"
    assert one != cache_path("resnet50", "torchscript")
    monkeypatch.setattr("batchtune.sample_models.version", lambda _package: "99.0")
    assert "99.0" in str(cache_path("resnet50", "torch"))
    assert one != cache_path("resnet50", "torch")


def test_the_command_line_exports_once_and_prints_the_base_path(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("BATCHTUNE_CACHE_DIR", str(tmp_path))
    for _ in range(2):
        assert main(["imdb_transformer", "--framework", "torch"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == second
    assert (Path(first) / "1" / "model.pt2").is_file()
    assert [path.name for path in Path(first).parent.iterdir()] == ["imdb_transformer"]


def test_a_framework_that_a_model_is_not_written_in_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["text_recognition", "--framework", "keras"])
    assert ended.value.code == 2
    assert "torch, torchscript" in capsys.readouterr().err


def test_a_directory_has_no_framework_to_choose(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="framework"):
        resolve_model(str(tmp_path), framework="torch")
