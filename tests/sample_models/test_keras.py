"""The transformer in PyTorch is the one in Keras, layer for layer: with the same weights it gives the same scores."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.slow  # Keras takes seconds to import

from batchtune.sample_models.torch_models import torch_model  # noqa: E402

# Keras's weights in the order in which it keeps them, and its positions, which it keeps as a constant: what goes into
# the attention less what the words are embedded as. A process of its own, so that no other test meets TensorFlow.
KERAS = """
import sys, keras, numpy as np
from batchtune.sample_models.keras_models import keras_model
model = keras_model("imdb_transformer")
tokens = np.load(sys.argv[1])
weights = {f"{at:02d}": weight.numpy() for at, weight in enumerate(model.weights)}
layers = (model.get_layer("embedding").output, model.get_layer("multi_head_attention").input[0])
words, hidden = keras.Model(model.inputs, layers).predict(tokens, verbose=0)
scores, parameters = model.predict(tokens, verbose=0), model.count_params()
np.savez(sys.argv[2], scores=scores, parameters=parameters, positions=(hidden - words)[0], **weights)
"""


@pytest.fixture(scope="module")
def tokens() -> np.ndarray:
    return np.random.default_rng(3).integers(0, 20_000, (4, 200)).astype(np.float32)


@pytest.fixture(scope="module")
def keras(tokens: np.ndarray, tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    folder = tmp_path_factory.mktemp("keras")
    np.save(folder / "tokens.npy", tokens)
    paths = [str(folder / "tokens.npy"), str(folder / "weights.npz")]
    subprocess.run([sys.executable, "-c", KERAS, *paths], check=True, capture_output=True, timeout=120)
    with np.load(folder / "weights.npz") as file:
        return dict(file)


def test_both_have_as_many_parameters(keras: dict[str, np.ndarray]) -> None:
    ours = sum(one.numel() for one in torch_model("imdb_transformer").parameters())
    assert ours == int(keras["parameters"]) + keras["positions"].size


def test_with_kerass_weights_the_torch_model_gives_kerass_scores(
    keras: dict[str, np.ndarray], tokens: np.ndarray
) -> None:
    weights = iter([keras[name] for name in sorted(keras) if name.isdigit()])
    model = torch_model("imdb_transformer")

    def take(parameter: torch.Tensor, *, transposed: bool = False) -> None:
        array = next(weights)
        # Keras keeps a head and its width as two dimensions: those of the query come last, of what joins them first.
        flat = array.reshape(-1, parameter.shape[0]).T if transposed else array.reshape(parameter.shape)
        assert flat.shape == tuple(parameter.shape)
        parameter.data.copy_(torch.tensor(np.ascontiguousarray(flat)))

    take(model.words.weight)
    model.positions.weight.data.copy_(torch.tensor(keras["positions"]))
    layers = [model.query, model.key, model.value, model.joined, model.after_attention]
    layers += [model.forwarded[0], model.forwarded[2], model.after_forward, model.scores[0], model.scores[2]]
    for layer in layers:
        take(layer.weight, transposed=isinstance(layer, torch.nn.Linear))
        take(layer.bias)
    assert next(weights, None) is None
    with torch.inference_mode():
        ours = model(torch.tensor(tokens)).numpy()
    np.testing.assert_allclose(ours, keras["scores"], rtol=1e-4, atol=1e-6)
    assert np.ptp(ours[:, 0]) > 1e-4
