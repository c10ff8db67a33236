"""How what was recommended is deployed: on the command line, in a container, by what another server reads."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest

from batchtune.cli.deployment import BUNDLED_FLAGS, build_command, deployment, docker_command
from batchtune.server.server_flags import ServerFlags
from tests.target.test_model_files import touched, write_onnx_naming
from tests.tune.tune_fakes import planted, scenario_of

FILE = Path("FILE")
BATCHED, ALONE = (planted(1, batching=batching).configuration for batching in ({"max_batch_size": 8}, None))
UNPADDED, BUCKETED = (
    replace(BATCHED, flags=(flag,)) for flag in (("zero_padding", "false"), ("length_buckets", "32,64"))
)
OURS, THEIRS = "batchtune-model-server", "tensorflow_model_server"
PORTS = " --port=8500 --rest_api_port=8501"
BATCHING = " --enable_batching --batching_parameters_file=FILE"
THREADS = " --grpc_max_threads=1040 --rest_api_num_threads=1040"
FEW_THREADS = {"server": "docker", "flags": {"grpc_max_threads": 7}}
FEW = THREADS.replace("1040", "7", 1)
PADDING = {"port": 9000, "zero_padding": True}
STAGES = {"allow_model_code": True, "--tensorflow_intra_op_parallelism": 1, **PADDING}
STAGED = {"flags": STAGES, "device": "cpu"}
UNTIL_PADDING = " --device=cpu --allow_model_code=true --tensorflow_intra_op_parallelism=1 --zero_padding="
PINNED = "\n# measured under taskset -c 0,2 and with --monitoring_config_file, which the command leaves out"
TF_SERVER = {"server": "local", "command": ["/opt/tf server"]}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Models of each kind; no program is on the PATH."""
    models = ("onnx/1/model.onnx", "torch/1/model.pt2", "m/x", "staged/1/stages.yaml")
    saved = (f"{folder}/saved_model.pb" for folder in ("saved/1", "bare", "staged/1"))
    weights = ("net.onnx.data", "more/weights.bin", "net.env", "net.onnx.bak")
    touched(*(tmp_path / name for name in (*models, *saved, *weights)))
    write_onnx_naming(tmp_path / "net.onnx", "net.onnx.data", "more/weights.bin")
    (tmp_path / "link").symlink_to(tmp_path / "saved", target_is_directory=True)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    return tmp_path


def of_model(folder, model, target):
    """A model that lies in the folder, else a sample or one that is gone."""
    path = folder / model
    return scenario_of(target={"model": str(path) if path.exists() else model, **target})


@pytest.mark.parametrize(
    ("model", "target", "configuration", "program", "base_path", "name", "rest"),
    [
        ("saved", {}, BATCHED, OURS, "HERE/saved", "saved", BATCHING),
        ("saved/1/saved_model.pb", {}, ALONE, OURS, "HERE/saved", "saved", ""),
        ("link", {}, ALONE, OURS, "HERE/link", "link", ""),
        ("onnx", {"flags": {"model_name": "n"}}, ALONE, OURS, "HERE/onnx", "n", ""),
        ("saved", {"server": "local"}, ALONE, THEIRS, "HERE/saved", "saved", THREADS),
        ("saved", TF_SERVER, BATCHED, "'/opt/tf server'", "HERE/saved", "saved", f"{BATCHING}{THREADS}"),
        ("saved", FEW_THREADS, ALONE, THEIRS, "HERE/saved", "saved", FEW),
        ("saved", STAGED, UNPADDED, OURS, "HERE/saved", "saved", f"{BATCHING}{UNTIL_PADDING}false"),
        ("saved", {"cpus": [0, 2]}, ALONE, OURS, "HERE/saved", "saved", PINNED),
    ],
)
def test_the_command_line_is_whole_and_of_the_server_that_was_measured(
    folder, model, target, configuration, program, base_path, name, rest
):
    line = deployment(configuration, of_model(folder, model, target), FILE).replace(str(folder), "HERE")
    assert line == f"{program} --model_base_path={base_path} --model_name={name}{PORTS}{rest}"


def test_a_model_without_version_directory_is_copied_into_one_and_a_sample_model_is_found(folder):
    bare, onnx, sample = (
        deployment(ALONE, of_model(folder, model, target), FILE).replace(str(folder), "HERE")
        for model, target in (("bare", {}), ("net.onnx", {}), ("imdb_transformer", {"framework": "torch"}))
    )
    assert bare.startswith("mkdir -p served/bare/1 && cp -r HERE/bare/. served/bare/1 && ")
    assert onnx == (
        "mkdir -p served/net/1 served/net/1/more && cp -r HERE/net.onnx served/net/1/model.onnx "
        "&& cp -r HERE/more/weights.bin served/net/1/more/weights.bin "
        "&& cp -r HERE/net.onnx.data served/net/1/net.onnx.data "
        f'&& {OURS} --model_base_path="$PWD"/served/net --model_name=net{PORTS}'
    )
    found = "$(python -m batchtune.sample_models imdb_transformer --framework torch)"
    assert sample.startswith(f'{OURS} --model_base_path="{found}" --model_name=imdb_transformer')


def test_a_file_with_a_space_is_one_word_before_the_flags(folder):
    line = deployment(UNPADDED, of_model(folder, "saved", {}), folder / "a b.txt")
    assert line.endswith(f"'--batching_parameters_file={folder}/a b.txt' --zero_padding=false")


@pytest.mark.parametrize(
    ("model", "target", "configuration", "theirs"),
    [
        ("saved", {}, BATCHED, True),
        ("saved", {}, BUCKETED, False),
        ("saved", {"flags": {"batch_scheduler": "streaming"}}, BATCHED, False),
        ("staged", {}, BATCHED, False),
        ("onnx", {}, ALONE, False),
    ],
)
def test_tensorflows_server_is_taken_where_it_can_do_the_same(folder, model, target, configuration, theirs):
    (folder / "bin").mkdir()
    (folder / "bin" / THEIRS).touch(mode=0o755)
    scenario = of_model(folder, model, target)
    assert deployment(configuration, scenario, FILE).startswith(THEIRS if theirs else OURS)
    image = f" --entrypoint={THEIRS} tensorflow/serving " if theirs else " --init batchtune-server "
    assert image in docker_command(configuration, scenario, FILE)


def test_the_flags_that_only_our_server_has_are_known():
    assert {flag.name for flag in fields(ServerFlags) if flag.metadata["ours"]} == BUNDLED_FLAGS


DOCKER = "docker run --rm --publish=127.0.0.1:8500:8500 --publish=127.0.0.1:8501:8501"
OUR_IMAGE, CUDA_IMAGE = "--init batchtune-server", "--gpus=all --init batchtune-server-cuda"
TF_IMAGE = f"--init --entrypoint={THEIRS} tensorflow/serving"
TF_CUDA_IMAGE = f"--gpus=all {TF_IMAGE}:latest-gpu"
MINE = {"docker": {"image": "mine", "gpus": "all"}, "flags": {"zero_padding": True}}
MINE_IMAGE = f"--gpus=all {TF_IMAGE.replace('tensorflow/serving', 'mine')}"
PADDED = f"{THREADS} --zero_padding=true"
BUILD = "docker/build.sh server"


@pytest.mark.parametrize(
    ("model", "target", "source", "inside", "image", "rest", "build"),
    [
        ("fake", {"framework": "keras"}, "PATH/fake", "fake", TF_IMAGE, THREADS, ""),
        ("fake", {"framework": "torch"}, "PATH/fake", "fake", OUR_IMAGE, "", f"TORCH=torch {BUILD}"),
        ("fake", {"device": "cuda"}, "PATH/fake", "fake", CUDA_IMAGE, " --device=cuda", f"{BUILD}-cuda"),
        ("torch", {"device": "cuda"}, "HERE/torch", "torch", CUDA_IMAGE, " --device=cuda", f"{BUILD}-cuda"),
        ("saved", {"device": "cuda"}, "HERE/saved", "saved", TF_CUDA_IMAGE, THREADS, ""),
        ("fake", MINE, "PATH/fake", "fake", MINE_IMAGE, PADDED, ""),
        ("saved/1/saved_model.pb", {}, "HERE/saved", "saved", TF_IMAGE, THREADS, ""),
        ("bare", {}, "HERE/bare", "bare/1", TF_IMAGE, THREADS, ""),
        ("onnx", {}, "HERE/onnx", "onnx", OUR_IMAGE, "", BUILD),
        ("torch", {}, "HERE/torch", "torch", OUR_IMAGE, "", f"TORCH=torch {BUILD}"),
        ("saved", {"flags": {"model_name": "n"}}, "HERE/saved", "n", TF_IMAGE, THREADS, ""),
        ("saved", FEW_THREADS, "HERE/saved", "saved", TF_IMAGE, FEW, ""),
        ("saved", STAGED, "HERE/saved", "saved", OUR_IMAGE, f"{UNTIL_PADDING}true", BUILD),
    ],
)
def test_a_container_has_the_image_that_can_do_what_was_measured_and_the_command_that_builds_it(
    folder, model, target, source, inside, image, rest, build
):
    scenario, name = of_model(folder, model, target), inside.partition("/")[0]
    mount = f"--mount=type=bind,source={source},target=/models/{inside},readonly"
    ports = "" if build else PORTS  # our image names them
    assert docker_command(ALONE, scenario, FILE).replace(str(folder), "HERE") == (
        f"{DOCKER} {mount} {image}{ports} --model_name={name} --model_base_path=/models/{name}{rest}\n"
    )
    assert build_command(ALONE, scenario) == build


def test_a_container_has_each_file_of_a_bare_model_in_its_version(folder):
    line = docker_command(ALONE, of_model(folder, "net.onnx", {}), FILE).replace(str(folder), "HERE")
    for source, inside in (("net.onnx", "model.onnx"), ("more/weights.bin",) * 2, ("net.onnx.data",) * 2):
        assert f"--mount=type=bind,source=HERE/{source},target=/models/net/1/{inside},readonly " in line
    assert line.count("--mount=") == 3


def test_a_triton_s_container_has_its_configuration_and_the_flags_of_the_server(folder):
    own = (("preserve_ordering", "true"), ("thread-count", "2"))
    flags = {"rate-limit": "execution_count", "disable-auto-complete-config": True, "http-port": 9000}
    configuration = replace(BATCHED, dialect="triton", flags=own)
    line = docker_command(configuration, of_model(folder, "m", {"flags": flags}), Path("config.pbtxt"))
    assert f"source={folder}/m,target=/models/m,readonly" in line
    assert "source=config.pbtxt,target=/models/m/config.pbtxt,readonly" in line
    words = "--rate-limit=execution_count --thread-count=2 --disable-auto-complete-config"
    assert line.endswith(f"tritonserver --model-repository=/models {words}\n")


JSON = "AGAIN --format json --write FILE"


@pytest.mark.parametrize(
    ("apply", "render", "commands"),
    [
        ("kubectl apply -f {file}", "k8s", "AGAIN --format k8s --write FILE; kubectl apply -f FILE"),
        ("./apply-it", None, f"{JSON}; ./apply-it < FILE"),
        ("put {json}", None, f"{JSON}; put FILE"),
        ("put {json} {file}", "k8s", f"AGAIN --format k8s --write FILE; {JSON}.json; put FILE.json FILE"),
    ],
)
def test_a_server_behind_commands_is_deployed_by_its_own(apply, render, commands):
    target = {"kind": "command", "model": "m", "rest_url": "http://h:1", "render": render}
    scenario = scenario_of(target={**target, "apply": apply.split()})
    assert deployment(BATCHED, scenario, FILE, recommend="AGAIN") == commands


@pytest.mark.parametrize(
    ("path", "where"), [("/etc/app.json", "/etc/app.json"), ("{scratch}/settings.json", "settings.json")]
)
def test_a_server_that_reads_a_file_is_deployed_by_that_file(path, where):
    settings = {"file": {"path": path, "change": {"rows": "{{rows}}"}}}
    own = {"url": "http://h:1/p", "launch": ["serve", path], "set": settings, "means": {"rows": "rows"}}
    body = {"request": {"body": {"x": "{{row}}"}}, "search": {"space": {"rows": [1, 8]}}}
    scenario = scenario_of(target={"kind": "http", **own}, **body)
    assert (
        deployment(scenario.configuration({"max_batch_size": 8}), scenario, FILE) == f"set rows: 8 in {where}"
    )
