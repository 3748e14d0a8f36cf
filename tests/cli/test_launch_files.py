"""Run files: errors that name the key, the commands they stand for, and the files for clusters."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate import FullyShardedDataParallelPlugin
from accelerate.commands import launch
from accelerate.utils.launch import prepare_multi_gpu_env
from torch.distributed.fsdp import CPUOffloadPolicy, StateDictType
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

from atroposlib.cli.atropos import main
from atroposlib.cli.launch import TARGETS, Target
from atroposlib.cli.launch.render import render
from atroposlib.cli.launch.run_file import read_run
from atroposlib.cli.launch.supervisor import Program
from atroposlib.cli.launch.up import programs_of
from atroposlib.errors import ConfigError
from tests.cli.helpers_launch import DEMO, write_run
from tests.processes import ROOT

SECRETS = {"ATROPOS_HUB_TOKEN": "secret-1", "HF_TOKEN": "secret-2"}

FULL: dict[str, Any] = {
    "name": "full",
    "model": "Qwen/Qwen3-0.6B",
    "image": "registry.example/atropos:1",
    "env": {"HF_TOKEN": "${HF_TOKEN}", "OMP_NUM_THREADS": 4, "TOKENIZERS_PARALLELISM": False},
    "setup": "source .venv/bin/activate",
    "slurm": {"options": {"partition": "gpu", "exclusive": True, "nice": 1, "x11": False}},
    "hub": {"cpus": 2, "memory": "4G"},
    "engine": {
        "command": ["vllm", "serve", "Qwen/Qwen3-0.6B", "--port", "${PORT}"],
        "count": 2,
        "gpus": 1,
        "image": "vllm/vllm-openai:latest",
    },
    "trainer": {"flags": {"num_steps": 10}, "gpus": 1, "time": "24:00:00"},
    "environments": {
        "gsm8k_server": {"count": 3, "flags": {"env.group_size": 8, "use_wandb": False}},
        "mine": {"file": "my_env.py", "restart": "never"},
    },
    "parts": {
        "judge": {"command": ["serve-judge"], "port": 7000},
        "fetch": {"command": ["fetch", "--to", "${RUN_DIR}/data"], "ready": "exit"},
    },
}
FULL["environments"]["mine"]["needs"] = ["judge", "fetch"]
HUBS: dict[str, Any] = {
    **FULL,
    "hub": {"count": 2, "env": {"ATROPOS_DATABASE": "${ATROPOS_DATABASE}"}},
}


def programs(tmp_path: Path, run: dict[str, Any], **environ: str) -> dict[str, Program]:
    path = write_run(tmp_path / "run.yaml", run)
    return {each.name: each for each in programs_of(read_run(path), tmp_path, environ)}


def documents(tmp_path: Path, run: dict[str, Any], target: Target) -> dict[str, Any]:
    """Render a run as one file and return its documents: manifests by kind and name, tasks by name."""
    render(write_run(tmp_path / "run.yaml", run), target=target, out=tmp_path)
    found = yaml.safe_load_all((tmp_path / "run.yaml").read_text())
    if target == "skypilot":
        return {each["name"]: each for each in found}
    return {f"{each['kind']} {each['metadata']['name']}": each for each in found}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"trainr": {}}, r"trainr: unknown key; did you mean trainer\?"),
        ({"hub": {"prot": 1}}, r"hub\.prot: unknown key; did you mean port\?"),
        ({"environments": {"a": {"flag": {}}}}, r"environments\.a\.flag: .* did you mean flags\?"),
        ({"hub": {"port": 99999}}, r"hub\.port: Input should be less than .*; got 99999"),
        ({"hub": {"count": 2}}, r"hub\.count: several hubs share a database: give .*database"),
        ({"name": "My Run"}, r"name: String should match pattern"),
        ({"trainer": {"time": 86400}}, r"trainer\.time: write it in quotes, as \"24:00:00\""),
        ({"engine": {"memory": "lots"}}, r"engine\.memory: .*; got lots"),
        ({"environments": {"gsm8k_servr": {}}}, r"gsm8k_servr: .* did you mean gsm8k_server\?"),
        ({"trainer": {"needs": ["enigne"]}}, r"trainer\.needs: .* did you mean engine\?"),
        ({"parts": {"x": {"command": ["a", "${HUB_ULR}"]}}}, r"HUB_ULR.* did you mean HUB_URL"),
        ({"parts": {"x": {}}}, r"parts\.x\.command: a value is required"),
        ({"parts": {"x": {"command": ["a"], "ready": "/"}}}, r"parts\.x\.ready: / needs a port"),
        ({"parts": {"hub": {"command": ["a"]}}}, r"hub: hub or an instance of it has this name"),
        (
            {"engine": {"count": 2}, "parts": {"engine_1": {"command": ["a"]}}},
            r"engine_1: engine or an instance of it has this name",
        ),
        ({"model": None}, r"engine\.model: a value is required, here or as the run's model"),
        ({"hub": {"needs": ["trainer"]}}, r"these parts wait for each other: .*hub"),
        ({"hub": {"port": 9001}}, r"hub and engine have port 9001"),
        ({"engine": {"command": ["x"], "flags": {"a": 1}}}, r"engine: give command or flags"),
        ({"trainer": {"accelerate": {}}}, r"trainer\.accelerate: TRL needs one vLLM, by engine"),
        ({"trainer": {"accelerate": {}, "command": ["x"]}}, r"give command or accelerate, not"),
        ({"hub": {"flags": {"token": "s3cret"}}}, r"hub\.flags: token: process lists show"),
        ({"env": {"HF_TOKEN": "s3cret"}}, r"env: HF_TOKEN is a secret: write \$\{HF_TOKEN\}"),
        ({"env": {"HF_TOKEN": "${HF_TOKEN}"}}, r"env\.HF_TOKEN: set the variable HF_TOKEN first"),
    ],
)
def test_a_wrong_run_file_is_refused_with_its_key(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    run = {"name": "run", "model": "m", "hub": {}, "engine": {}, "trainer": {}}
    with pytest.raises(ConfigError, match=message) as refused:
        programs(tmp_path, run | change)
    assert "s3cret" not in str(refused.value)


def test_the_command_exits_with_2_for_a_wrong_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["up", str(write_run(tmp_path / "run.yaml", {"nam": "x"}))]) == 2
    said = capsys.readouterr().err
    assert "name: a value is required" in said
    assert "nam: unknown key; did you mean name?" in said


def test_short_forms_stand_for_commands_with_the_addresses_of_the_others(tmp_path: Path) -> None:
    found = programs(tmp_path, FULL, **SECRETS)
    assert list(found) == [
        *("hub", "engine-0", "engine-1", "judge", "fetch"),
        *("trainer", "gsm8k_server-0", "gsm8k_server-1", "gsm8k_server-2", "mine"),
    ]
    assert found["engine-1"].argv[-2:] == ["--port", "9002"]
    trainer = " ".join(found["trainer"].argv)
    assert "--hub_url=http://127.0.0.1:8000" in trainer
    assert "--engine_url=http://127.0.0.1:9001,http://127.0.0.1:9002" in trainer
    assert "--num_steps=10" in trainer
    assert found["trainer"].needs == ["hub", "engine-0", "engine-1"]
    urls = [
        next(word for word in found[f"gsm8k_server-{i}"].argv if "base_url" in word)
        for i in range(3)
    ]
    assert [url[-7:-3] for url in urls] == ["9001", "9002", "9001"]
    assert "--use_wandb=false" in found["gsm8k_server-0"].argv
    assert found["mine"].argv[:3] == ["python", "my_env.py", "serve"]
    assert found["mine"].needs == ["hub", "engine-0", "engine-1", "judge", "fetch"]
    assert found["hub"].env["HF_TOKEN"] == "secret-2"
    assert found["hub"].env["TOKENIZERS_PARALLELISM"] == "false"
    assert "secret" not in " ".join(word for each in found.values() for word in each.argv)


def test_a_flag_in_the_file_replaces_the_launchers_in_any_spelling(tmp_path: Path) -> None:
    run = {
        "name": "run",
        "model": "m",
        "hub": None,
        "trainer": {"flags": {"hub-url": "http://elsewhere", "resume": False}},
        "environments": {"gsm8k_server": {"flags": {"tokenizer_name": "t"}}},
    }
    found = programs(tmp_path, run)
    assert [word for word in found["trainer"].argv if "hub" in word] == [
        "--hub_url=http://elsewhere"
    ]
    assert "--resume=false" in found["trainer"].argv
    assert [word for word in found["gsm8k_server"].argv if "tokenizer" in word] == [
        "--tokenizer_name=t"
    ]


@pytest.mark.parametrize(
    "hub", [{"flags": {"memory": True}}, {"env": {"ATROPOS_DATABASE": "${ATROPOS_DATABASE}"}}]
)
def test_a_hub_without_a_data_directory_gets_none(tmp_path: Path, hub: dict[str, Any]) -> None:
    found = programs(tmp_path, {"name": "run", "hub": hub}, ATROPOS_DATABASE="postgresql://x")
    assert "data_dir" not in " ".join(found["hub"].argv)


@pytest.mark.parametrize(
    "hub",
    [
        {"flags": {"database": "postgresql://db/runs"}},
        {"env": {"ATROPOS_DATABASE": "${ATROPOS_DATABASE}"}},
        {"command": ["run-api", "--port", "${PORT}", "--database=postgresql://db/runs"]},
    ],
)
def test_hubs_that_share_a_database_serve_the_environments_in_turn(
    tmp_path: Path, hub: dict[str, Any]
) -> None:
    run = {
        "name": "run",
        "hub": {"count": 2, **hub},
        "environments": {"gsm8k_server": {"count": 3}},
    }
    found = programs(tmp_path, run, ATROPOS_DATABASE="postgresql://db/runs")
    assert [found[f"hub-{i}"].env["PORT"] for i in range(2)] == ["8000", "8001"]
    advertised = "--advertise=http://127.0.0.1:8001" in found["hub-1"].argv
    assert advertised == ("command" not in hub)
    assert [found[f"gsm8k_server-{i}"].env["HUB_URL"][-4:] for i in range(3)] == [
        *("8000", "8001", "8000")
    ]


def test_a_trainer_under_accelerate_is_trls_with_fsdp2_on_its_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readme = (ROOT / "example_trainer" / "README.md").read_text()
    run = yaml.safe_load(readme.split("<!-- trl-run-file -->\n```yaml\n")[1].split("```")[0])
    run["image"] = "registry.example/atropos:1"
    assert programs(tmp_path, run, **SECRETS)["trainer"].restart == "never"
    pod = documents(tmp_path, run, "kubernetes")["Job trl-trainer"]["spec"]["template"]["spec"]
    assert pod["restartPolicy"] == "Never"
    argv = pod["containers"][0]["command"]
    assert argv[:3] == ["python", "-m", "accelerate.commands.launch"]

    arguments = launch.launch_command_parser().parse_args(argv[3:])
    arguments, *_ = launch._validate_launch_command(arguments)
    assert (arguments.num_processes, arguments.mixed_precision) == (8, "bf16")
    assert arguments.module
    assert arguments.training_script == "example_trainer.other_trainers.trl_worker"
    assert arguments.training_script_args == [
        "--model_name=Qwen/Qwen3-32B",
        "--hub_url=$(HUB_URL)",
        "--vllm_server_base_url=$(ENGINE_URL)",
        "--output_dir=$(RUN_DIR)/checkpoints",
        "--max_steps=200",
        "--gradient_accumulation_steps=4",
        "--max_token_len=8192",
    ]
    for name, value in prepare_multi_gpu_env(arguments).items():
        monkeypatch.setenv(name, value)
    plugin = FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == 2
    assert plugin.reshard_after_forward is True
    assert isinstance(plugin.cpu_offload, CPUOffloadPolicy)
    assert plugin.state_dict_type == StateDictType.FULL_STATE_DICT
    assert plugin.auto_wrap_policy is transformer_auto_wrap_policy


def test_the_run_file_of_the_readme_is_valid(tmp_path: Path) -> None:
    readme = (ROOT / "atroposlib" / "cli" / "launch" / "README.md").read_text()
    text = readme.split("<!-- run-file -->\n```yaml\n")[1].split("```")[0]
    found = programs(tmp_path, yaml.safe_load(text), **SECRETS)
    assert len(found) == 10
    assert found["count_vowels"].needs == ["hub", "engine-0", "engine-1", "judge"]


def test_the_demo_is_a_short_run_file(tmp_path: Path) -> None:
    assert len(DEMO.read_text().splitlines()) <= 26
    found = programs_of(read_run(DEMO), tmp_path, {})
    assert [each.name for each in found] == [
        *("hub", "warm_up", "engine", "trainer", "letter_reversal_server")
    ]


@pytest.mark.parametrize("target", TARGETS)
def test_rendered_files_have_no_secret_and_name_the_variables(
    tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    render(write_run(tmp_path / "run.yaml", FULL), target=target, out=tmp_path / "out")
    text = "".join(path.read_text() for path in (tmp_path / "out").iterdir())
    for name, value in SECRETS.items():
        assert name in text
        assert value not in text


def test_slurm_scripts_are_valid_and_ask_for_the_resources(tmp_path: Path) -> None:
    render(write_run(tmp_path / "run.yaml", FULL), target="slurm", out=tmp_path / "jobs")
    for path in (tmp_path / "jobs").iterdir():
        subprocess.run(["bash", "-n", path], check=True)
    engine = (tmp_path / "jobs" / "engine.sbatch").read_text()
    assert "#SBATCH --array=0-1\n" in engine
    assert "#SBATCH --gres=gpu:1\n" in engine
    assert "#SBATCH --partition=gpu\n#SBATCH --exclusive\n#SBATCH --nice=1\n" in engine
    assert "x11" not in engine
    assert "#SBATCH --requeue\n" in engine
    assert "source .venv/bin/activate\n" in engine
    assert 'vllm serve Qwen/Qwen3-0.6B --port "${PORT}"' in engine.replace(" \\\n        ", " ")
    assert 'run_part "engine-$INDEX" /health 600 always 5' in engine
    environment = (tmp_path / "jobs" / "gsm8k_server.sbatch").read_text()
    assert 'ENGINE_URL=$(address "engine-$((INDEX % 2))")' in environment
    mine = (tmp_path / "jobs" / "mine.sbatch").read_text()
    assert "#SBATCH --no-requeue\n" in mine
    assert "wait_for fetch exit" in mine
    trainer = (tmp_path / "jobs" / "trainer.sbatch").read_text()
    assert "#SBATCH --time=24:00:00\n" in trainer
    assert '"--weights_dir=${RUN_DIR}/weights"' in trainer
    assert "end_job $? run" in trainer


@pytest.mark.parametrize("num_hubs", [1, 2])
def test_kubernetes_manifests_fit_the_published_schemas(tmp_path: Path, num_hubs: int) -> None:
    validate = pytest.importorskip("kubernetes_validate")
    manifests = documents(tmp_path, FULL if num_hubs == 1 else HUBS, "kubernetes")
    for manifest in manifests.values():
        validate.validate(manifest, "1.31", strict=True)
    assert {"StatefulSet full-hub", "Service full-engine", "Job full-gsm8k-server"} <= {*manifests}
    wrong = manifests["Service full-engine"] | {"spec": {"prots": []}}
    with pytest.raises(validate.ValidationError):
        validate.validate(wrong, "1.31", strict=True)


def test_kubernetes_pods_are_probed_and_find_each_other(tmp_path: Path) -> None:
    by_name = documents(tmp_path, FULL, "kubernetes")
    engine = by_name["StatefulSet full-engine"]["spec"]["template"]["spec"]["containers"][0]
    assert engine["image"] == "vllm/vllm-openai:latest"
    assert engine["command"][-2:] == ["--port", "$(PORT)"]
    assert engine["startupProbe"]["httpGet"] == {"path": "/health", "port": 9001}
    assert engine["resources"]["limits"] == {"nvidia.com/gpu": "1"}
    job = by_name["Job full-gsm8k-server"]["spec"]
    assert (job["completions"], job["parallelism"], job["completionMode"]) == (3, 3, "Indexed")
    pod = job["template"]["spec"]
    assert [each["name"] for each in pod["initContainers"]] == ["wait-for-hub", "wait-for-engine"]
    variables = {each["name"]: each for each in pod["containers"][0]["env"]}
    assert variables["HUB_URL"]["value"] == "http://full-hub-0.full-hub:8000"
    assert variables["HF_TOKEN"]["valueFrom"]["secretKeyRef"] == {
        "name": "full-secrets",
        "key": "HF_TOKEN",
    }
    assert by_name["Job full-mine"]["spec"]["template"]["spec"]["restartPolicy"] == "Never"


def test_the_hubs_data_are_on_a_volume_or_disk_of_its_own(tmp_path: Path) -> None:
    by_name = documents(tmp_path, FULL, "kubernetes")
    hub = by_name["StatefulSet full-hub"]["spec"]
    [claim] = hub["volumeClaimTemplates"]
    assert claim["spec"]["resources"]["requests"] == {"storage": "100Gi"}
    pod = hub["template"]["spec"]
    assert {"name": claim["metadata"]["name"], "mountPath": "/data"} in pod["containers"][0][
        "volumeMounts"
    ]
    assert {"name": "DATA_DIR", "value": "/data/hub"} in pod["containers"][0]["env"]
    assert "--data_dir=$(DATA_DIR)" in pod["containers"][0]["command"]
    engine = by_name["StatefulSet full-engine"]["spec"]
    assert "volumeClaimTemplates" not in engine
    assert len(engine["template"]["spec"]["containers"][0]["volumeMounts"]) == 1
    assert (
        "volumeClaimTemplates"
        not in documents(tmp_path, HUBS, "kubernetes")["StatefulSet full-hub"]["spec"]
    )
    task = documents(tmp_path, FULL, "skypilot")["hub"]
    assert task["envs"]["DATA_DIR"] == "/var/tmp/atropos/full"
    assert '"--data_dir=${DATA_DIR}"' in task["run"]


@pytest.mark.parametrize("target", TARGETS)
def test_a_hub_with_a_certificate_is_called_by_https_and_one_without_is_warned_of(
    tmp_path: Path, target: Target
) -> None:
    def rendered(flags: dict[str, Any]) -> str:
        run = {**FULL, "hub": {"flags": flags}}
        hint = render(write_run(tmp_path / "run.yaml", run), target=target, out=tmp_path / "out")
        return hint + "".join(path.read_text() for path in (tmp_path / "out").iterdir())

    plain, tls = rendered({}), rendered({"ssl_certfile": "/c/hub.crt", "ssl_keyfile": "/c/hub.key"})
    assert ("unencrypted" in plain, "unencrypted" in tls) == (True, False)
    found = {
        "slurm": "PORT=$((8000 + INDEX)) SCHEME=https",
        "skypilot": "export HUB_URL=https://hub-0.${SKYPILOT_JOBGROUP_NAME}:8000",
        "kubernetes": "value: https://full-hub-0.full-hub:8000",
    }
    assert (found[target] in plain, found[target] in tls) == (False, True)
    if target == "kubernetes":
        for manifest in yaml.safe_load_all((tmp_path / "out" / "run.yaml").read_text()):
            if manifest["metadata"]["name"] == "full-hub" and manifest["kind"] == "StatefulSet":
                probe = manifest["spec"]["template"]["spec"]["containers"][0]["readinessProbe"]
                assert probe["httpGet"] == {"path": "/healthz", "port": 8000, "scheme": "HTTPS"}
        assert "until wget -q -T 5 -O /dev/null https://full-hub-0.full-hub:8000/healthz" in tls


KUBECTL = r"""#!/bin/sh
echo "$1" >> calls
case "$*" in
    "get jobs -l app.kubernetes.io/part-of=full -o jsonpath="*) cat states ;;
    "get jobs -l app.kubernetes.io/part-of=full -o name") echo job.batch/full-trainer; echo job.batch/full-mine ;;
    "get statefulsets -l app.kubernetes.io/part-of=full -o name") echo statefulset.apps/full-hub ;;
    "scale statefulset.apps/full-hub --replicas=0") ;;
    "patch job.batch/full-"*' --type=merge -p {"spec":{"suspend":true}}') ;;
    *) exit 1 ;;
esac
"""


def end_of_run(
    folder: Path, pod: dict[str, Any], *, states: str, kubectl: str = KUBECTL
) -> tuple[int, list[str]]:
    """Run the program that ends the run; return its exit status and the calls of kubectl."""
    (folder / "states").write_text(states)
    for name, text in {"kubectl": kubectl, "sleep": "#!/bin/sh\nexit 9\n"}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    command = [word.replace("$$", "$") for word in pod["containers"][0]["command"]]
    environ = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    done = subprocess.run(command, cwd=folder, env=environ)
    return done.returncode, (folder / "calls").read_text().split()


@pytest.mark.parametrize(
    ("states", "ends"),
    [
        ("trainer:SuccessCriteriaMet:Complete\nmine\n", True),
        ("trainer\nmine:FailureTarget:Failed\n", True),
        ("trainer\nmine:SuccessCriteriaMet:Complete\n", False),
        ("", False),
    ],
)
def test_a_job_of_kubernetes_stops_all_pods_when_the_run_has_ended(
    tmp_path: Path, states: str, ends: bool
) -> None:
    by_name = documents(tmp_path, FULL, "kubernetes")
    job = by_name["Job full-end"]["spec"]["template"]["spec"]
    assert "labels" not in by_name["Job full-end"]["metadata"]  # it does not suspend itself
    [rules] = [each["rules"] for each in by_name.values() if each["kind"] == "Role"]
    assert {"patch"} <= {verb for rule in rules for verb in rule["verbs"]}
    status, calls = end_of_run(tmp_path, job, states=states)
    assert status == (0 if ends else 9)
    assert calls == (["get", "get", "get", "scale", "patch", "patch"] if ends else ["get"])


@pytest.mark.parametrize("what", ["statefulsets", "jobs"])
def test_the_job_of_kubernetes_is_tried_again_when_it_cannot_list_what_to_stop(
    tmp_path: Path, what: str
) -> None:
    job = documents(tmp_path, FULL, "kubernetes")["Job full-end"]["spec"]["template"]["spec"]
    assert job["restartPolicy"] == "OnFailure"
    answers = KUBECTL.replace(
        f'"get {what} -l app.kubernetes.io/part-of=full -o name") ', "unknown) "
    )
    status, calls = end_of_run(tmp_path, job, states="trainer:Complete\n", kubectl=answers)
    assert status == 1
    assert {*calls} == {"get"}


def test_no_part_of_kubernetes_has_the_name_of_the_job_that_ends_the_run(tmp_path: Path) -> None:
    run = {"name": "run", "image": "i", "parts": {"End": {"command": ["x"]}}}
    with pytest.raises(ConfigError, match="end: the Job that ends the run has this name"):
        render(write_run(tmp_path / "run.yaml", run), target="kubernetes", out=tmp_path)


def test_kubernetes_needs_an_image(tmp_path: Path) -> None:
    run = {**FULL, "image": None}
    with pytest.raises(ConfigError, match=r"hub\.image: a value is required"):
        render(write_run(tmp_path / "run.yaml", run), target="kubernetes", out=tmp_path)


def test_skypilot_gets_a_job_group(tmp_path: Path) -> None:
    by_name = documents(tmp_path, FULL, "skypilot")
    assert by_name.pop("full") == {
        "name": "full",
        "execution": "parallel",
        "primary_tasks": ["trainer"],
        "termination_delay": "30s",
    }
    engine = by_name["engine"]
    assert engine["num_nodes"] == 2
    assert engine["resources"]["accelerators"] == "H100:1"
    assert engine["secrets"] == {"HF_TOKEN": None}
    assert engine["envs"]["OMP_NUM_THREADS"] == "4"
    script = by_name["gsm8k-server"]["run"]
    assert "ENGINE_URL=http://engine-$((INDEX % 2)).${SKYPILOT_JOBGROUP_NAME}:9001" in script
    assert by_name["hub"]["resources"]["memory"] == "4+"
    for task in by_name.values():
        subprocess.run(["bash", "-n"], input=task["run"].encode(), check=True)


# Several hubs: each advertises the address that clients have, since others may not know its machine's own name.


def words_of_python(script: str, directory: Path, **variables: str) -> list[str]:
    """Run a script in which `python` prints its arguments."""
    program = directory / "bin" / "python"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    program.chmod(0o755)
    environ = {"PATH": f"{program.parent}:/usr/bin:/bin", **SECRETS, **variables}
    environ["ATROPOS_DATABASE"] = "postgresql://db/runs"
    done = subprocess.run(["bash", "-c", script], env=environ, check=True, capture_output=True)
    return done.stdout.decode().splitlines()


def test_several_hubs_on_slurm_call_each_other_by_their_nodes_addresses(tmp_path: Path) -> None:
    run = {**HUBS, "setup": "export NODE_ADDRESS=10.0.0.7"}
    render(write_run(tmp_path / "run.yaml", run), target="slurm", out=tmp_path / "jobs")
    script = (tmp_path / "jobs" / "hub.sbatch").read_text()
    subprocess.run(["bash", "-n"], input=script.encode(), check=True)
    start, _, _ = script.partition("run_part ")
    words = words_of_python(
        f"{start}PROGRAM", tmp_path, SLURM_ARRAY_TASK_ID="1", RUN_FILES=str(tmp_path / "jobs")
    )
    assert words[-3:] == [*("--host=0.0.0.0", "--port=8001", "--advertise=http://10.0.0.7:8001")]
    client = (tmp_path / "jobs" / "gsm8k_server.sbatch").read_text()
    assert "wait_for hub-1 /healthz" in client
    assert 'HUB_URL=$(address "hub-$((INDEX % 2))")' in client


def test_several_hubs_on_kubernetes_call_each_other_by_their_pods_names(tmp_path: Path) -> None:
    by_name = documents(tmp_path, HUBS, "kubernetes")
    hubs = by_name["StatefulSet full-hub"]["spec"]
    assert (hubs["replicas"], hubs["serviceName"]) == (2, "full-hub")
    container = hubs["template"]["spec"]["containers"][0]
    assert container["command"][-1] == "--advertise=$(HUB_URL)"
    variables = {each["name"]: each for each in container["env"]}
    assert variables["HUB_URL"]["value"] == "http://full-hub-$(INDEX).full-hub:8000"
    assert list(variables).index("INDEX") < list(variables).index("HUB_URL")  # so it is replaced
    assert variables["ATROPOS_DATABASE"]["valueFrom"]["secretKeyRef"]["name"] == "full-secrets"
    client = by_name["Job full-gsm8k-server"]["spec"]["template"]["spec"]
    variables = {each["name"]: each for each in client["containers"][0]["env"]}
    assert variables["HUB_URL"]["value"] == "http://full-hub:8000"
    wait = " ".join(client["initContainers"][0]["command"])
    assert all(f"http://full-hub-{i}.full-hub:8000/healthz" in wait for i in range(2))


def test_several_hubs_on_skypilot_call_each_other_by_their_nodes_names(tmp_path: Path) -> None:
    by_name = documents(tmp_path, HUBS, "skypilot")
    assert by_name["hub"]["num_nodes"] == 2
    assert by_name["hub"]["secrets"]["ATROPOS_DATABASE"] is None
    words = words_of_python(
        by_name["hub"]["run"], tmp_path, SKYPILOT_NODE_RANK="1", SKYPILOT_JOBGROUP_NAME="full"
    )
    assert words[-1] == "--advertise=http://hub-1.full:8000"
    script = by_name["gsm8k-server"]["run"]
    assert "HUB_URL=http://hub-$((INDEX % 2)).${SKYPILOT_JOBGROUP_NAME}:8000\n" in script


def test_a_rendered_script_names_the_variable_that_is_not_set(tmp_path: Path) -> None:
    render(write_run(tmp_path / "run.yaml", FULL), target="slurm", out=tmp_path / "jobs")
    environ = {name: value for name, value in os.environ.items() if name not in SECRETS}
    ran = subprocess.run(
        ["bash", tmp_path / "jobs" / "hub.sbatch"], env=environ, capture_output=True, text=True
    )
    assert ran.returncode != 0
    assert "set it before submit.sh" in ran.stderr
