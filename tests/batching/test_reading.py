"""Is a file of parameters read as the server reads it that it was written for, and written so that it reads back?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from batchtune.batching.cortex import format_cortex
from batchtune.batching.flags import format_flags
from batchtune.batching.formats import parse_batching, read_batching_file
from batchtune.batching.kubernetes import (
    ParametersFile,
    digest_of,
    format_k8s,
    format_kserve,
    kubernetes_name,
)
from batchtune.batching.parameters import (
    LARGEST_VALUES,
    BatchingFile,
    BatchingParameters,
    Configuration,
    to_dict,
)
from batchtune.batching.tfserving_file import RenderedDialect, rendered
from batchtune.batching.triton_config import format_triton
from batchtune.errors import BatchingParametersError

WORKERS = st.none() | st.integers(1, 512)


@st.composite
def parameters_of_a_server(draw: st.DrawFn) -> BatchingParameters:
    """Parameters that TensorFlow Serving accepts."""
    size = draw(st.integers(1, 2**31 - 1))
    some = draw(st.booleans())
    text = st.text(st.characters(codec="ascii", exclude_categories=["C"]), max_size=9)
    return BatchingParameters(
        max_batch_size=size if some else None,
        batch_timeout_micros=draw(st.none() | st.integers(0, LARGEST_VALUES["batch_timeout_micros"])),
        max_enqueued_batches=draw(st.none() | st.integers(1, 2**31 - 1)),
        num_batch_threads=draw(WORKERS),
        thread_pool_name=draw(st.none() | text),
        allowed_batch_sizes=draw(st.sampled_from([(), (size,)])) if some else (),
        pad_variable_length_inputs=draw(st.booleans()),
        enable_large_batch_splitting=draw(st.none() | st.booleans()) if some else None,
        max_execution_batch_size=draw(st.none() | st.integers(1, size)) if some else None,
    )


ANY = parameters_of_a_server()
SERVER_FLAGS = st.dictionaries(
    st.sampled_from(["grpc_max_threads", "odd"]), st.from_regex(r"[a-z =#'\"]{1,6}", fullmatch=True)
)


def read_back(parameters: BatchingParameters, dialect: RenderedDialect, **flags: str) -> BatchingFile:
    configuration = Configuration(batching=parameters, flags=tuple(sorted(flags.items())))
    return parse_batching(rendered(configuration, dialect, model="m"), source="file")


@pytest.mark.parametrize("dialect", ["tfserving", "flags", "k8s", "kserve"])
@given(ANY, SERVER_FLAGS)
def test_what_tensorflow_serving_takes_reads_back(
    dialect: RenderedDialect, parameters: BatchingParameters, flags: dict[str, str]
) -> None:
    if dialect == "tfserving":
        flags = {}
    file = read_back(parameters, dialect, **flags)
    read_as = "kubernetes" if dialect.startswith("k") else dialect
    assert (file.dialect, file.parameters, dict(file.settings)) == (read_as, parameters, flags)
    assert file.enabled


@given(st.integers(2, 1024), st.integers(1, 10**8), st.integers(1, 512))
def test_cortex_reads_back(size: int, micros: int, threads: int) -> None:
    parameters = BatchingParameters(
        max_batch_size=size, batch_timeout_micros=micros, num_batch_threads=threads
    )
    file = read_back(parameters, "cortex")
    assert (file.dialect, file.parameters) == ("cortex", parameters)


@given(
    st.builds(
        BatchingParameters,
        max_batch_size=st.integers(1, 4096),
        batch_timeout_micros=st.none() | st.integers(0, 10**9),
        num_batch_threads=WORKERS,
        max_enqueued_batches=st.none() | st.integers(1, 10**5),
    ),
    st.integers(1, 50),
)
def test_a_config_pbtxt_reads_back(parameters: BatchingParameters, rows: int) -> None:
    text = rendered(Configuration(batching=parameters), "triton", model="m", rows_per_request=rows)
    file = parse_batching(text, source="file")
    assert file.dialect == "triton"
    assert file.knobs(on_triton=False, rows_per_request=rows)[0] == to_dict(parameters)


def test_a_queue_longer_than_triton_can_say_is_its_longest() -> None:
    parameters = BatchingParameters(max_batch_size=10_000, max_enqueued_batches=2**31 - 1)
    assert f"max_queue_size: {2**32 - 1} " in format_triton(parameters)


@pytest.mark.parametrize("policy", ["", "default_queue_policy { max_queue_size: 0 }"])
def test_a_queue_without_limit_is_told_where_the_other_server_has_one(policy: str) -> None:
    file = parse_batching(f"max_batch_size: 8 dynamic_batching {{ {policy} }}", source="config.pbtxt")
    (note,) = file.knobs(on_triton=False)[1]
    assert "in Triton no limit" in note
    assert "10 batches wait" in note
    assert file.knobs(on_triton=True)[1] == ()
    theirs = parse_batching("max_batch_size { value: 8 }", source="b.txt")
    (note,) = theirs.knobs(on_triton=True)[1]
    assert "in TensorFlow Serving 10; Triton's queue has no limit" in note
    assert theirs.knobs(on_triton=False)[1] == ()


def test_a_config_pbtxt_without_a_size_is_not_taken_for_tensorflow_servings_default() -> None:
    file = parse_batching("dynamic_batching { }", source="config.pbtxt")
    with pytest.raises(BatchingParametersError, match="max_batch_size is absent"):
        file.knobs(on_triton=False)


@pytest.mark.parametrize("dialect", ["flags", "k8s", "kserve"])
def test_no_batching_is_read_as_such(dialect: RenderedDialect) -> None:
    text = rendered(Configuration(batching=None), dialect, model="m")
    assert parse_batching(text, source="f").knobs(on_triton=False)[0] == {"enable_batching": False}
    # TensorFlow Serving's file has nothing to say: the flag is left out.
    assert "Leave out --enable_batching" in rendered(Configuration(batching=None), "tfserving", model="m")


CONFIG_PBTXT = """\
name: "m"
platform: "onnxruntime_onnx"  # not our business
max_batch_size: 32
input [ { name: "x" data_type: TYPE_FP32 dims: [ 4 ] } ]
dynamic_batching {
  preferred_batch_size: [ 8, 16 ]
  max_queue_delay_microseconds: 100
  preserve_ordering: true
  default_queue_policy { timeout_action: REJECT max_queue_size: 64 }
  priority_levels: 2
}
instance_group [ { kind: KIND_GPU count: 2 gpus: [ 0 ] }, { kind: KIND_CPU } ]
parameters { key: "k" value { string_value: "v" } }
"""


def test_a_config_pbtxt_is_told_apart_and_its_own_settings_are_kept() -> None:
    file = parse_batching(CONFIG_PBTXT, source="any name")
    knobs, notes = file.knobs(on_triton=True)
    assert knobs == {
        "max_batch_size": 32,
        "batch_timeout_micros": 100,
        "num_batch_threads": 2,
        "preferred_batch_size": [8, 16],
        "preserve_ordering": True,
        "default_queue_policy.timeout_action": "REJECT",
        "default_queue_policy.max_queue_size": 64,
    }
    assert notes == ("any name:10: priority_levels stays out: no search changes priorities",)
    knobs, notes = file.knobs(on_triton=False, rows_per_request=4)
    assert knobs["max_enqueued_batches"] == 8
    assert "preferred_batch_size has no counterpart in TensorFlow Serving" in notes
    assert not set(knobs) & {"preferred_batch_size", "preserve_ordering"}


CORTEX_YAML = """\
- name: resnet
  kind: RealtimeAPI
  predictor:
    type: tensorflow
    models: {path: s3://bucket}
    server_side_batching: {max_batch_size: 32, batch_interval: 0.1s}
    processes_per_replica: 4
    threads_per_process: 192
  compute: {gpu: 1}
"""


@pytest.mark.parametrize(
    ("text", "micros"), [("1m30s", 90_000_000), ("1.5ms", 1500), ("100us", 100), ("1ns", 1), (".5s", 500_000)]
)
def test_an_interval_is_a_duration_of_go(text: str, micros: int) -> None:
    yaml_text = CORTEX_YAML.replace("0.1s", text)
    assert parse_batching(yaml_text, source="cortex.yaml").parameters.batch_timeout_micros == micros


@pytest.mark.parametrize(
    ("name", "text", "words", "hint"),
    [
        ("b.txt", "max_batch_size: 8\n", "b.txt:1: max_batch_size is a wrapper", "max_batch_size { value: 8 }"),
        ("b.txt", "\nmax_batch_sise { value: 8 }", "b.txt:2: unknown batching parameter", "max_batch_size"),
        ("config.pbtxt", "max_batch_sise: 8", "config.pbtxt:1: ModelConfig has no field", "max_batch_size"),
        ("config.pbtxt", "max_batch_size: 0", "config.pbtxt:1: max_batch_size 0: the model's tensors", ""),
        ("config.pbtxt", "max_batch_size: -1", "config.pbtxt:1: max_batch_size must be 0 to 2147483647; was -1", ""),
        ("config.pbtxt", "max_batch_size: 3000000000", "config.pbtxt:1: max_batch_size must be 0 to 2147483647", ""),
        ("c", "instance_group { count: -2 }", "c:1: count must be 0 to 4096; was -2", ""),
        ("c", "dynamic_batching {\n preferred_batch_size: [ 4, 0 ] }", "c:2: preferred_batch_size must be 1 to", ""),
        ("c", "dynamic_batching { max_queue_delay_microseconds: -1 }", "c:1: max_queue_delay_microseconds must be 0", ""),
        ("c", "dynamic_batching { default_queue_policy { max_queue_size: 5000000000 } }", "c:1: max_queue_size must be 0 to 4294967295", ""),
        ("b.txt", "\nmax_batch_size { value: -1 }", "b.txt:2: max_batch_size: input_batch_size_limit must be positive; was -1", "at least 1"),
        ("b.txt", "# max_batch_size\nmax_batch_size { value: 0 } # now", "b.txt:2: max_batch_size: input_batch_size_limit", "at least 1"),
        ("b.txt", "num_batch_threads { value: 1000000 }", "b.txt:1: num_batch_threads must be at most 4096", ""),
        ("b.txt", "batch_timeout_micros { value: 9223372036854775807 }", "b.txt:1: batch_timeout_micros must be at most", ""),
        ("b.txt", "max_batch_size { value: 8 }\nallowed_batch_sizes: 4", "b.txt:2: Last entry in allowed_batch_sizes", ""),
        ("f", "--enable_batching\n--batch_timeout_micros=-5", "f:2: batch_timeout_micros must be non-negative", ""),
        ("c", "dynamic_batching {\n  max_delay: 5\n}", "c:2: dynamic_batching has no field 'max_delay'", ""),
        ("c", "instance_group { cout: 2 }", "c:1: instance_group has no field", "count"),
        ("c", "sequence_batching { }", "c:1: sequence_batching: it is not a dynamic batcher", ""),
        ("c", "dynamic_batching { default_queue_policy { timeout_action: STOP } }", "c:1: timeout_action must", ""),
        ("c", "dynamic_batching: 3", "c:1: dynamic_batching must be a block", ""),
        ("f", "--max_batch_size=8\n--num_batch_threads=two", "f:2: num_batch_threads must be a whole", ""),
        ("f", "--enable_batching\n--max_batch_sise=8", "f:2: --max_batch_sise: unknown batching", "max_batch_size"),
        ("f", "--max_batch_size=8 \\\n --max_batch_size=9", "f:2: --max_batch_size is given twice", ""),
        ("f", "--batching_parameters_file=x", "f:1: --batching_parameters_file=x names another file", ""),
        ("f", "--a='", "f:1: No closing quotation", ""),
        ("f", "--a=1 b", "f:1: expected --name=value; was 'b'", ""),
        ("k.yaml", "a: [", "k.yaml: not YAML", ""),
        ("k.yaml", "", "k.yaml: the file is empty", ""),
        ("k.yaml", "just words", "k.yaml:1: expected the keys of an API", ""),
        ("k.yaml", "server_side_batching:\n  max_batch_size: 8\n", "k.yaml:2: server_side_batching.batch_interval: missing", ""),
        ("k.yaml", "server_side_batching:\n  max_batch: 8\n", "k.yaml:2: max_batch: server_side_batching has no", "max_batch_size"),
        ("k.yaml", CORTEX_YAML.replace("32", "2048"), "k.yaml:6: max_batch_size: Cortex accepts 2 to 1024", ""),
        ("k.yaml", CORTEX_YAML.replace("0.1s", "0.1"), "k.yaml:6: batch_interval: expected a duration", ""),
        ("k.yaml", CORTEX_YAML.replace("0.1s", "0s"), "k.yaml:6: batch_interval: Cortex accepts only", ""),
        ("k.yaml", CORTEX_YAML.replace("0.1s", "99999999h"), "k.yaml:6: batch_interval: expected at most 24h; was 99999999h", ""),
        ("k.yaml", CORTEX_YAML.replace("0.1s", "1" * 99_999 + "s"), "k.yaml:6: batch_interval: expected a duration", ""),
        ("k.yaml", CORTEX_YAML.replace("0.1s", "\u0661s"), "k.yaml:6: batch_interval: expected a duration", ""),
        ("k.yaml", CORTEX_YAML.replace("32", "-1"), "k.yaml:6: max_batch_size: expected a whole number above 0; was '-1'", ""),
        ("k.yaml", CORTEX_YAML.replace("replica: 4", "replica: 9999"), "k.yaml:7: processes_per_replica: expected at most 4096", ""),
        ("k.yaml", CORTEX_YAML.replace("    threads", "    processes_per_replica: 2\n    threads"), "k.yaml:8: processes_per_replica: given twice", "keep one"),
        ("k.yaml", CORTEX_YAML.replace("192", "7"), "k.yaml:6: server_side_batching: max_batch_size (32) must be less than or equal to processes_per_replica * threads_per_process (4 * 7 = 28)", ""),
        ("k.yaml", CORTEX_YAML.replace("tensorflow", "python"), "k.yaml:6: server_side_batching: threads_per_process (192) must be max_batch_size", ""),
        ("k.yaml", CORTEX_YAML.replace("processes_per", "process_per"), "k.yaml:7: process_per_replica: predictor has no such key", "processes_per_replica"),
        ("k.yaml", CORTEX_YAML.replace("replica: 4", "replica: four"), "k.yaml:7: processes_per_replica: expected a whole", ""),
        ("k.yaml", CORTEX_YAML * 2, "k.yaml:15: server_side_batching: a second API", ""),
        ("m", "apiVersion: apps/v1\nargs:\n- --batching_parameters_file=/x\n", "m:3: no ConfigMap here has", "data"),
        ("m", "apiVersion: apps/v1\nargs:\n- --enable_batching\n- --batching_parameters_file=/x\n", "m:4: no ConfigMap here has", "x"),
        ("m", "apiVersion: v1\ncommand: [sh, -c, exec tensorflow_model_server --enable_batching]\n", "m:2: a shell in the", "own args"),
        ("m", "apiVersion: v1\ncontainers: [{image: nvcr.io/nvidia/tritonserver:26.04-py3}]\n", "m: a Triton's parameters", "that file"),
        ("m", "apiVersion: v1\ncontainers:\n- image: tf\n  args: 5\n", "m:4: command and args of a container are lists of words; was '5'", "args: ["),
        ("m", "apiVersion: v1\nkind: Service\n", "m: neither a ConfigMap with batching_parameters.txt nor", "Deployment"),
        ("m", "apiVersion: v1\ndata: &a [*a]\n", "m: nested too deeply", ""),
        ("m", "apiVersion: v1\ncontainers:\n- args: [--enable_batching]\n- args: [--enable_batching]\n", "m:4: a second server", "one server only"),
        ("m", "apiVersion: v1\ncontainers:\n- args: [--enable_batching, --grpc_max_threads=$(N)]\n", "m:3: --grpc_max_threads=$(N): its value", "own"),
        ("m", "apiVersion: v1\ncontainers:\n- command: [sh]\n  args:\n  - -c\n  - serve --port=1\n", "m:3: a shell in the container", ""),
        ("c.yaml", "version: '3'\nservices:\n  s: {command: [--enable_batching]}\n", "c.yaml:2: a compose file", "docker run"),
    ],
)  # fmt: skip
def test_what_no_server_takes_is_told_with_its_line(name: str, text: str, words: str, hint: str) -> None:
    with pytest.raises(BatchingParametersError) as raised:
        parse_batching(text, source=name)
    assert raised.value.message.startswith(words)
    assert hint in raised.value.hint


def test_a_mistake_in_a_config_map_is_told_with_the_line_of_the_manifest() -> None:
    configuration = Configuration(batching=BatchingParameters(max_batch_size=8, num_batch_threads=2))
    text = rendered(configuration, "k8s", model="m").replace("num_batch_threads {", "num_batch_thread {")
    line = next(at for at, words in enumerate(text.splitlines(), 1) if "num_batch_thread {" in words)
    with pytest.raises(BatchingParametersError, match=rf"^m\.yaml:{line}: unknown batching parameter"):
        parse_batching(text, source="m.yaml")


CONFIG_MAP = """\
apiVersion: v1
kind: ConfigMap
data:
  batching.config: |
    # read where --enable_batching is given
    max_batch_size { value: 8 }
"""
DEPLOYMENT = """\
---
apiVersion: apps/v1
kind: Deployment
spec: {template: {spec: {containers: [{args: [%s, --batching_parameters_file=/conf/batching.config]}]}}}
"""


SIDECARS = """\
      initContainers: [{name: fetch, command: [sh, -c, "fetch --enable_batching=no"]}]
      containers:
      - {name: proxy, image: envoy, args: [--concurrency=2]}
      - name: server
        image: tensorflow/serving:2.19.1
        args: [--port=8500, --model_base_path=/m, --tensorflow_intra_op_parallelism=2, --grpc_max_threads=64,
               --ssl_config_file=/etc/tls.txt%s]
        livenessProbe: {exec: {command: [probe, --addr=:8500]}}
"""
TEMPLATE = "apiVersion: apps/v1\nkind: Deployment\nspec:\n  template:\n    spec:\n" + SIDECARS


OFF = {"enable_batching": False}
OWN = {"tensorflow_intra_op_parallelism": "2", "grpc_max_threads": "64"}
A_PATH = "--ssl_config_file=/etc/tls.txt is left out: that path is the container's"
AT_ONCE = "Cortex's processes and threads keep at most {} requests under way at once"
ITS_FILE = ", --enable_batching, --batching_parameters_file=/conf/batching.config"
MOUNTED = CONFIG_MAP + "---\n" + TEMPLATE % ITS_FILE
FLAGS = "--port=8500 --rest_api_port=8501 --model_name=m --model_base_path=/m --max_batch_size=8 --odd=1"
SCRIPT = "docker run -e P=a#b tf --saved_model_tags=a#b --enable_batching --max_batch_size=8 # now\n"
SERVER_SIDE = "    server_side_batching: {max_batch_size: 32, batch_interval: 0.1s}\n"
A_HASH = {"max_batch_size": 8, "saved_model_tags": "a#b"}
ONE_PROCESS = CORTEX_YAML.replace("    processes_per_replica: 4\n", "")
CORTEX_KNOBS = {"max_batch_size": 32, "batch_timeout_micros": 100_000}


@pytest.mark.parametrize(
    ("text", "knobs", "notes"),
    [
        (CORTEX_YAML, {**CORTEX_KNOBS, "num_batch_threads": 4}, (AT_ONCE.format(768),)),
        (CORTEX_YAML.replace(SERVER_SIDE, ""), {"num_batch_threads": 4, **OFF}, ()),
        (ONE_PROCESS, {**CORTEX_KNOBS, "num_batch_threads": 1}, (AT_ONCE.format(192),)),
        # The file that the args name may have any name; a switch that is off counts more than a file.
        (CONFIG_MAP + DEPLOYMENT % "--enable_batching=true", {"max_batch_size": 8}, ()),
        (DEPLOYMENT % "--enable_batching" + "---\n" + CONFIG_MAP, {"max_batch_size": 8}, ()),
        (CONFIG_MAP + DEPLOYMENT % "--enable_batching=false", OFF, ()),
        # The server's own flags are taken over.
        (MOUNTED, {"max_batch_size": 8, **OWN}, (A_PATH,)),
        (TEMPLATE % "", {**OWN, **OFF}, (A_PATH,)),
        # A deployment keeps its ports and its model to itself; a hash within a word begins no comment.
        (FLAGS, {"max_batch_size": 8, "odd": "1"}, ()),
        ("--saved_model_tags=a#b --max_batch_size=8 # it's eight", A_HASH, ()),
        (SCRIPT, A_HASH, ()),
    ],
)
def test_a_file_is_read_for_tf_serving(text: str, knobs: dict[str, Any], notes: tuple[str, ...]) -> None:
    assert parse_batching(text, source="f").knobs(on_triton=False) == (knobs, notes)


BATCHING_FILE = (
    "max_batch_size { value: 8 }\nmax_enqueued_batches { value: 10 }\nallowed_batch_sizes: [4, 8]\n"
)
QUEUED = {"max_batch_size": 8, "default_queue_policy.max_queue_size": 40}


@pytest.mark.parametrize(
    ("text", "knobs", "notes"),
    [
        # Without a dynamic batcher nothing is batched.
        ('name: "m" max_batch_size: 8', {"max_batch_size": 8, **OFF}, []),
        ("dynamic_batching { }", {}, []),
        (BATCHING_FILE, QUEUED, ["allowed_batch_sizes has no counterpart in Triton"]),
        (TEMPLATE % "", OFF, [A_PATH, *(f"{name} has no counterpart in Triton" for name in OWN)]),
    ],
)
def test_a_file_is_read_for_triton(text: str, knobs: dict[str, Any], notes: list[str]) -> None:
    read, told = parse_batching(text, source="f").knobs(on_triton=True, rows_per_request=2)
    assert (read, sorted(told)) == (knobs, sorted(notes))


def test_what_kubectl_tells_as_json_is_read() -> None:
    manifests = list(yaml.safe_load_all(CONFIG_MAP + "---\n" + TEMPLATE % ", --enable_batching"))
    manifests[0]["data"]["batching_parameters.txt"] = manifests[0]["data"].pop("batching.config")
    manifests[1]["metadata"] = {"annotations": {"last-applied": "sh -c 'serve --enable_batching'"}}
    listed = {"apiVersion": "v1", "items": manifests, "kind": "List"}
    for text in (json.dumps(listed), json.dumps(listed, indent=4), yaml.safe_dump(listed)):
        assert parse_batching(text, source="m.json").knobs(on_triton=False)[0] == {"max_batch_size": 8, **OWN}
    wrong = json.dumps(listed, indent=4).replace("value: 8", "valu: 8")
    line = next(at for at, words in enumerate(wrong.splitlines(), 1) if "valu: 8" in words)
    with pytest.raises(BatchingParametersError, match=rf"^m\.json:{line}: batching_parameters\.txt:2: "):
        parse_batching(wrong, source="m.json")


def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "b.txt"
    path.write_text("max_batch_size { value: 8 }\n", encoding="utf-8-sig")
    assert read_batching_file(path).parameters.max_batch_size == 8


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "latin").write_bytes(b"\xff")
    for name, words in (("none", "No such file"), ("", "directory"), ("latin", "UTF-8")):
        with pytest.raises(BatchingParametersError, match=words) as raised:
            read_batching_file(tmp_path / name)
        assert raised.value.message.startswith(f"{tmp_path / name}: ")


def test_a_deployment_mounts_its_parameters_and_names_them() -> None:
    configuration = Configuration(
        batching=BatchingParameters(max_batch_size=8), flags=(("grpc_max_threads", "64"),)
    )
    config_map, deployment = yaml.safe_load_all(rendered(configuration, "k8s", model="My_Model"))
    assert config_map["metadata"]["name"] == "my-model-batching"
    assert config_map["data"]["batching_parameters.txt"].endswith("max_batch_size { value: 8 }\n")
    template = deployment["spec"]["template"]
    assert deployment["metadata"]["name"] == "my-model"
    file = "--batching_parameters_file=/batchtune/batching_parameters.txt"
    args = ["--enable_batching=true", file, "--grpc_max_threads=64"]
    mounts = [{"name": "batching", "mountPath": "/batchtune"}]
    assert template["spec"]["containers"] == [{"name": "my-model", "args": args, "volumeMounts": mounts}]
    assert template["spec"]["volumes"] == [{"name": "batching", "configMap": {"name": "my-model-batching"}}]
    assert template["metadata"]["labels"]["batchtune"].startswith("p")


def test_pods_of_other_parameters_have_another_label() -> None:
    labels = set()
    for size in (8, 16):
        configuration = Configuration(batching=BatchingParameters(max_batch_size=size))
        *_, service = yaml.safe_load_all(rendered(configuration, "kserve", model="m"))
        labels.add(service["metadata"]["labels"]["batchtune"])
        assert service["spec"]["predictor"]["model"]["args"][0] == "--enable_batching=true"
    assert len(labels) == 2


def test_without_batching_nothing_is_mounted() -> None:
    (deployment,) = yaml.safe_load_all(rendered(Configuration(batching=None), "k8s", model="m"))
    assert deployment["spec"]["template"]["spec"] == {"containers": [{"name": "m", "args": []}]}


@pytest.mark.parametrize("write", [format_k8s, format_kserve])
def test_a_tritons_file_takes_the_place_of_the_one_in_the_repository(write: object) -> None:
    configuration = Configuration(batching=BatchingParameters(max_batch_size=8), dialect="triton")
    file = ParametersFile(name="config.pbtxt", text=CONFIG_PBTXT)
    text = write(configuration, file, model="m")  # type: ignore[operator]
    assert "/m/config.pbtxt" in text
    assert "args:" not in text
    assert digest_of(configuration, file) in text
    assert parse_batching(text, source="f").parameters.max_batch_size == 32


def test_names_are_those_that_kubernetes_takes() -> None:
    assert kubernetes_name("Text_Recognition.v2") == "text-recognition-v2"
    assert kubernetes_name("__") == "model"
    assert len(kubernetes_name("x" * 99)) <= 54


TUNED = BatchingParameters(
    max_batch_size=32, batch_timeout_micros=2000, num_batch_threads=2, max_enqueued_batches=100
)


def test_triton_config_is_written_with_its_own_names() -> None:
    assert format_triton(TUNED).splitlines() == [
        "max_batch_size: 32",
        "dynamic_batching {",
        "  max_queue_delay_microseconds: 2000",
        "  default_queue_policy { max_queue_size: 3200 }",
        "}",
        "instance_group [{ count: 2 kind: KIND_AUTO }]",
    ]


def test_triton_queues_requests_and_tf_serving_batches() -> None:
    text = format_triton(TUNED, rows_per_request=5)
    assert "max_queue_size: 600" in text  # six requests a batch
    assert "in TF Serving 10; Triton's queue has no limit" in format_triton(BatchingParameters())
    assert "no limit" not in text


def test_what_triton_cannot_say_is_said_in_a_comment() -> None:
    text = format_triton(BatchingParameters(max_batch_size=8, allowed_batch_sizes=(4, 8)))
    assert text.startswith("# allowed_batch_sizes has no counterpart in Triton\n")
    assert format_triton(None).startswith("# no dynamic_batching block")


def test_cortex_keys_are_legal_by_cortex_own_rules() -> None:
    written = yaml.safe_load(format_cortex(TUNED))
    assert written == {
        "server_side_batching": {"max_batch_size": 32, "batch_interval": "2ms"},
        "processes_per_replica": 2,
        "threads_per_process": 64,
    }
    assert format_cortex(None).startswith("# no server_side_batching block")
    with pytest.raises(BatchingParametersError, match="above 0"):
        format_cortex(BatchingParameters(max_batch_size=8))


def test_flags_are_one_line_for_a_shell() -> None:
    line = format_flags(
        BatchingParameters(max_batch_size=8, allowed_batch_sizes=(4, 8), pad_variable_length_inputs=True)
    )
    assert line == (
        "--enable_batching=true --max_batch_size=8 --allowed_batch_sizes=4,8 --pad_variable_length_inputs=true"
    )
    assert format_flags(None) == "--enable_batching=false"
