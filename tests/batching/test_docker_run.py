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


RUN = f"docker run -v ./conf:/conf tf {FLAGS}"
USER_RUN = f"docker run -u $(id -u) -v $(pwd)/conf:/conf tf {FLAGS}"
LONG = (
    "sudo docker run -d --rm -it -p 8500:8500 --name tfs {} \\\n  -e MODEL_NAME=m --gpus all \\\n"
    f"  tensorflow/serving:latest-gpu --model_name=m --port=8500 {FLAGS} &"
)


@pytest.mark.parametrize(
    "command",
    [
        # Whatever the mount is called.
        LONG.format('-v "$PWD/conf:/conf:ro"'),
        LONG.format("-v$(pwd)/conf:/conf"),
        LONG.format("--volume=./conf/b.txt:/conf/b.txt"),
        LONG.format("--mount type=bind,source=$(pwd)/conf,target=/conf,readonly"),
        LONG.format("--mount=type=bind,src=conf,dst=/conf"),
        # What stands around the command is not the server's.
        f"exec {RUN} > log.txt 2>&1 &",
        f"sudo -E {RUN}; echo --done",
        f"DOCKER_HOST=unix:///x nohup {RUN} && curl --retry 3 http://x",
        f"/usr/bin/{RUN}",
        # In a list or a substitution.
        f"docker pull tf && {USER_RUN}",
        f"docker rm -f tfs; {USER_RUN}",
        f"docker rm -f tfs || true\n# was: docker pull tf && docker run tf\n{USER_RUN}",
        f"ID=$({USER_RUN})",
        f"ID=$({USER_RUN}) && docker logs -f $(cat id)",
        f"ID=`{RUN}`",
        f"if [ -z $X ]; then {USER_RUN}; fi",
        f"( {USER_RUN} )",
    ],
)
def test_a_docker_run_is_read_with_its_mounted_file_and_its_flags(command: str, tmp_path: Path) -> None:
    file = read_batching_file(script_of(tmp_path, command))
    assert (file.dialect, file.enabled) == ("docker", True)
    assert file.knobs(on_triton=False)[0] == {**SAID, "grpc_max_threads": "1000"}


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
    own = {"grpc_max_threads": "1000", "ssl_config_file": "/etc/tls.txt"}
    assert file.knobs(on_triton=False) == ({**SAID, **own}, ())


def test_the_number_of_a_redirection_is_no_value_of_a_flag(tmp_path: Path) -> None:
    line = "tensorflow_model_server --max_batch_size=8 --enable_batching 2>&1 | tee log"
    assert read_batching_file(script_of(tmp_path, line)).knobs(on_triton=False)[0] == {"max_batch_size": 8}


def test_a_path_in_the_container_is_left_out_and_told(tmp_path: Path) -> None:
    (note,) = read_batching_file(script_of(tmp_path, f"{RUN} --ssl_config_file=/etc/tls.txt")).notes
    assert note == "--ssl_config_file=/etc/tls.txt is left out: that path is the container's"


def test_the_switch_that_would_make_a_server_deaf_to_its_file_is_left_out_and_told(tmp_path: Path) -> None:
    switch = "--enable_per_model_batching_parameters"
    script = script_of(tmp_path, "")
    for text in (RUN, "tensorflow_model_server", "--max_batch_size=8"):
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


A_SHELL = ":3: a shell in the container"
A_COMPOSE_FILE = ":3: the server's flags are in a compose file"
FILE_FLAG = "--batching_parameters_file"


@pytest.mark.parametrize(
    ("command", "words", "hint"),
    [
        (f"docker run -v ./o:/o tf {FLAGS}", ":3: no --mount or --volume holds /conf/b.txt", "the file"),
        (f'docker run -v "$DIR:/conf" tf {FLAGS}', ":3: $DIR depends on the shell", "write the path"),
        (f"docker run -v ~/conf:/conf tf {FLAGS}", ":3: ~/conf depends on the shell", "the path"),
        (f"docker run -v ./gone:/conf tf {FLAGS}", "gone/b.txt: No such file", ""),
        ("docker run tf\ndocker run tf", ":4: a second docker run", "keep one"),
        (f"docker run tf sh -c 'tensorflow_model_server {FLAGS}'", A_SHELL, "file"),
        (f'docker run --entrypoint sh tf -lc "serve {FLAGS}"', A_SHELL, "file"),
        ("docker run tf $FLAGS", ":3: $FLAGS: its value is not known here", "the server's own"),
        ("docker run tf -enable_batching", "takes flags as --name=value", "write --enable_batching"),
        ("docker run tf --port 30", ":3: --port 30: the server takes flags", "write --port=30"),
        (f"docker run tf {FILE_FLAG} /conf/b.txt", "takes flags as --name=value", f"write {FILE_FLAG}=PATH"),
        ("docker compose run --rm tfs", A_COMPOSE_FILE, "its command as"),
        ("cd x && docker-compose up", A_COMPOSE_FILE, "mounts"),
        ("docker run --rm", ":3: docker run names no image", ""),
        ("docker run tf 'a", ":3: No closing quotation", ""),
        ("docker run x tritonserver", "a Triton's parameters are in the model's config.pbtxt", "give that"),
        (f"{RUN} --max_batch_size=8", "in the command and in", "keep the file's"),
        ("docker run tf --max_batch_sise=8", ":3: --max_batch_sise: unknown batching", "max_batch_size"),
        ("docker run tf --max_batch_size=-1", ":3: max_batch_size: input_batch_size", "at least 1"),
        ("numactl tensorflow_model_server", ":3: cannot read how the server is started here", "begins with"),
        ("tritonserver --model-repository=/m", ":3: a Triton's parameters are in", "give that"),
        ("tensorflow_model_server\ntensorflow_model_server", ":4: a second server", "keep one"),
        (f"tensorflow_model_server {FILE_FLAG}=$D/b", f":3: {FILE_FLAG}=$D/b: its value", "the file"),
        (f"tensorflow_model_server {FILE_FLAG}=gone.txt", ":3: ", ""),
    ],
)
def test_a_mistake_names_file_line_and_remedy(command: str, words: str, hint: str, tmp_path: Path) -> None:
    with pytest.raises(BatchingParametersError) as caught:
        read_batching_file(script_of(tmp_path, command))
    assert (f"serve.sh{words}" if words.startswith(":") else words) in caught.value.message
    assert hint in (caught.value.hint or "")
