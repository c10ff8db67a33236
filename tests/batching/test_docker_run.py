"""Is a `docker run` read as the server in the container would understand it?"""

from __future__ import annotations

from pathlib import Path

import pytest

from batchtune.batching.formats import read_batching_file
from batchtune.batching.parameters import BatchingParameters, Configuration, to_dict
from batchtune.batching.tfserving_file import parameters_file
from batchtune.cli.deployment import docker_command
from batchtune.errors import BatchingParametersError
from batchtune.scenario.reader import ScenarioText, read_scenario

PARAMETERS = "max_batch_size { value: 16 }\nbatch_timeout_micros { value: 500 }\n"
SAID = {"max_batch_size": 16, "batch_timeout_micros": 500}
FLAGS = "--enable_batching --batching_parameters_file=/conf/b.txt --grpc_max_threads=1000"


def script_of(folder: Path, command: str) -> Path:
    (folder / "conf").mkdir()
    (folder / "conf" / "b.txt").write_text(PARAMETERS)
    script = folder / "serve.sh"
    script.write_text(f"#!/bin/sh\nset -e\n{command}\necho started\n")
    return script


@pytest.mark.parametrize(
    "mount",
    [
        '-v "$PWD/conf:/conf:ro"',
        "-v$(pwd)/conf:/conf",
        "--volume=./conf/b.txt:/conf/b.txt",
        "--mount type=bind,source=$(pwd)/conf,target=/conf,readonly",
        "--mount=type=bind,src=conf,dst=/conf",
    ],
)
def test_the_mounted_file_and_the_flags_are_read(mount: str, tmp_path: Path) -> None:
    command = (
        f"sudo docker run -d --rm -it -p 8500:8500 --name tfs {mount} \\\n  -e MODEL_NAME=m --gpus all \\\n"
        f"  tensorflow/serving:latest-gpu --model_name=m --port=8500 {FLAGS} &"
    )
    file = read_batching_file(script_of(tmp_path, command))
    assert (file.dialect, file.enabled) == ("docker", True)
    assert file.knobs(on_triton=False)[0] == {**SAID, "grpc_max_threads": "1000"}


@pytest.mark.parametrize("before", ["exec ", "sudo -E ", "DOCKER_HOST=unix:///x nohup ", "/usr/bin/"])
@pytest.mark.parametrize("after", ["", " > log.txt 2>&1 &", "; echo --done", " && curl --retry 3 http://x"])
def test_what_stands_around_a_command_is_not_the_servers(before: str, after: str, tmp_path: Path) -> None:
    script = script_of(tmp_path, f"{before}docker run -v ./conf:/conf tf {FLAGS}{after}")
    assert read_batching_file(script).knobs(on_triton=False)[0] == {**SAID, "grpc_max_threads": "1000"}


@pytest.mark.parametrize(
    "command",
    [
        "docker pull tf && {}",
        "docker rm -f tfs; {}",
        "docker rm -f tfs || true\n# was: docker pull tf && docker run tf\n{}",
        "ID=$({})",
        "ID=$({}) && docker logs -f $(cat id)",
        "ID=`{}`",
        "if [ -z $X ]; then {}; fi",
        "( {} )",
    ],
)
def test_a_command_in_a_list_or_a_substitution_is_read(command: str, tmp_path: Path) -> None:
    run = f"docker run -u $(id -u) -v $(pwd)/conf:/conf tf {FLAGS}"
    run = run.replace("$(id -u)", "1") if "`" in command else run
    script = script_of(tmp_path, command.format(run))
    assert read_batching_file(script).knobs(on_triton=False)[0] == {**SAID, "grpc_max_threads": "1000"}


@pytest.mark.parametrize(
    "command",
    [
        "tensorflow_model_server --model_name=m {} &",
        "exec /usr/bin/tensorflow_model_server \\\n  --port=8500 {} > log",
        "TF_CPP_MIN_LOG_LEVEL=1 nohup ./bin/batchtune-model-server {}",
        "ExecStart=/usr/local/bin/tensorflow_model_server {}",
        "set +e; tensorflow_model_server {} || exit 1",
    ],
)
def test_a_line_that_starts_a_server_itself_is_read(command: str, tmp_path: Path) -> None:
    flags = FLAGS.replace("/conf/", "conf/") + " --ssl_config_file=/etc/tls.txt"
    file = read_batching_file(script_of(tmp_path, command.format(flags)))
    assert (file.dialect, file.enabled) == ("flags", True)
    assert file.knobs(on_triton=False) == (
        {**SAID, "grpc_max_threads": "1000", "ssl_config_file": "/etc/tls.txt"},
        (),
    )


def test_the_number_of_a_redirection_is_no_value_of_a_flag(tmp_path: Path) -> None:
    line = "tensorflow_model_server --max_batch_size=8 --enable_batching 2>&1 | tee log"
    assert read_batching_file(script_of(tmp_path, line)).knobs(on_triton=False)[0] == {"max_batch_size": 8}


def test_a_path_in_the_container_is_left_out_and_told(tmp_path: Path) -> None:
    script = script_of(tmp_path, f"docker run -v ./conf:/conf tf {FLAGS} --ssl_config_file=/etc/tls.txt")
    assert read_batching_file(script).notes == (
        "--ssl_config_file=/etc/tls.txt is left out: that path is the container's",
    )


def test_the_switch_that_would_make_a_server_deaf_to_its_file_is_left_out_and_told(tmp_path: Path) -> None:
    switch = "--enable_per_model_batching_parameters"
    script = script_of(tmp_path, "")
    for text in (f"docker run -v ./conf:/conf tf {FLAGS}", "tensorflow_model_server", "--max_batch_size=8"):
        for value, is_told in (("", True), ("=true", True), ("=false", False)):
            script.write_text(f"{text} {switch}{value}\n")
            file = read_batching_file(script)
            assert [note.startswith(f"{switch} is left out: ") for note in file.notes] == [True] * is_told
            assert switch.removeprefix("--") not in file.settings


def test_a_docker_and_a_run_on_two_lines_are_no_command(tmp_path: Path) -> None:
    script = tmp_path / "serve.sh"
    script.write_text("docker # first\nrun it\n")
    with pytest.raises(BatchingParametersError):
        read_batching_file(script)


def test_without_the_switch_the_file_does_not_count(tmp_path: Path) -> None:
    script = script_of(tmp_path, "docker run -v ./conf:/conf tf --batching_parameters_file=/conf/b.txt")
    assert read_batching_file(script).enabled is False
    script.write_text("docker run --rm tensorflow/serving\n")
    assert read_batching_file(script).knobs(on_triton=False)[0] == {"enable_batching": False}


def test_a_tritons_configuration_is_the_mounted_one(tmp_path: Path) -> None:
    (tmp_path / "config.pbtxt").write_text("max_batch_size: 8\ndynamic_batching {}\n")
    script = tmp_path / "serve.sh"
    script.write_text(
        "docker run -v ./config.pbtxt:/models/m/config.pbtxt nvcr.io/x tritonserver --http-port=1\n"
    )
    file = read_batching_file(script)
    assert (file.dialect, file.parameters.max_batch_size) == ("triton", 8)


def test_what_recommend_writes_reads_back(tmp_path: Path) -> None:
    parameters = BatchingParameters(max_batch_size=64, batch_timeout_micros=3000, num_batch_threads=2)
    configuration = Configuration(batching=parameters, flags=(("grpc_max_threads", "64"),))
    file = tmp_path / "batching_parameters.txt"
    file.write_text(parameters_file(configuration).text)
    text = "name: s\nobjective: throughput\ntarget: {model: imdb}\nload: {arrivals: closed, concurrency: 8}\n"
    scenario = read_scenario(ScenarioText(text=text, source="s.yaml", directory=tmp_path))
    script = tmp_path / "serve.sh"
    script.write_text(docker_command(configuration, scenario, file))
    assert read_batching_file(script).knobs(on_triton=False)[0] == {
        **to_dict(parameters),
        "grpc_max_threads": "64",
        "rest_api_num_threads": "1040",
    }


@pytest.mark.parametrize(
    ("command", "words", "hint"),
    [
        (
            f"docker run -v ./other:/other tf {FLAGS}",
            "serve.sh:3: no --mount or --volume holds /conf/b.txt",
            "the file",
        ),
        (
            'docker run -v "$DIR:/conf" tf ' + FLAGS,
            "serve.sh:3: $DIR depends on the shell",
            "write the path",
        ),
        (
            f"docker run -v ~/conf:/conf tf {FLAGS}",
            "serve.sh:3: ~/conf depends on the shell",
            "the path",
        ),
        (f"docker run -v ./gone:/conf tf {FLAGS}", "gone/b.txt: No such file", ""),
        ("docker run tf\ndocker run tf", "serve.sh:4: a second docker run", "keep one"),
        (
            f"docker run tf sh -c 'tensorflow_model_server {FLAGS}'",
            "serve.sh:3: a shell in the container",
            "file",
        ),
        (
            f'docker run --entrypoint sh tf -lc "serve {FLAGS}"',
            "serve.sh:3: a shell in the container",
            "file",
        ),
        ("docker run tf $FLAGS", "serve.sh:3: $FLAGS: its value is not known here", "the server's own"),
        ("docker run tf -enable_batching", "takes flags as --name=value", "write --enable_batching"),
        (
            "docker run tf --enable_batching --grpc_max_threads 30",
            "serve.sh:3: --grpc_max_threads 30: the server takes flags",
            "write --grpc_max_threads=30",
        ),
        (
            "docker run tf --enable_batching --batching_parameters_file /conf/b.txt",
            "takes flags as --name=value",
            "write --batching_parameters_file=PATH",
        ),
        (
            "docker compose run --rm tfs",
            "serve.sh:3: the server's flags are in a compose file",
            "its command as",
        ),
        ("cd x && docker-compose up", "serve.sh:3: the server's flags are in a compose file", "mounts"),
        ("docker run --rm", "serve.sh:3: docker run names no image", ""),
        ("docker run tf 'a", "serve.sh:3: No closing quotation", ""),
        (
            "docker run nvcr.io/x tritonserver",
            "a Triton's parameters are in the model's config.pbtxt",
            "give that",
        ),
        (
            f"docker run -v ./conf:/conf tf {FLAGS} --max_batch_size=8",
            "in the command and in",
            "keep the file's",
        ),
        (
            "docker run tf --max_batch_sise=8",
            "serve.sh:3: --max_batch_sise: unknown batching parameter",
            "max_batch_size",
        ),
        ("docker run tf --max_batch_size=-1", "serve.sh:3: max_batch_size: input_batch_size", "at least 1"),
        (
            "numactl -N 0 tensorflow_model_server --port=1",
            "serve.sh:3: cannot read how the server is started here",
            "a line that begins with",
        ),
        ("tritonserver --model-repository=/m", "serve.sh:3: a Triton's parameters are in", "give that"),
        ("tensorflow_model_server\ntensorflow_model_server", "serve.sh:4: a second server", "keep one"),
        (
            "tensorflow_model_server --batching_parameters_file=$DIR/b.txt",
            "serve.sh:3: --batching_parameters_file=$DIR/b.txt: its value",
            "the file",
        ),
        (
            "tensorflow_model_server --batching_parameters_file=gone.txt",
            "serve.sh:3: ",
            "",
        ),
    ],
)
def test_a_mistake_names_file_line_and_remedy(command: str, words: str, hint: str, tmp_path: Path) -> None:
    script = script_of(tmp_path, command)
    with pytest.raises(BatchingParametersError) as caught:
        read_batching_file(script)
    assert words in caught.value.message
    assert hint in (caught.value.hint or "")
