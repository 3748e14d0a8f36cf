"""What goes into a sandbox and what comes out, on each backend that this machine has.

`ATROPOS_TEST_DOCKER_IMAGE` names an image of the Docker daemon, for example python:3.11-slim; without it the tests in
containers are skipped, and a program in the place of `docker` shows what it would be asked to do.
"""

import os
import secrets
import socket
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

import pytest

from atroposlib.envs import sandbox, sandbox_child
from atroposlib.envs.sandbox import (
    BubblewrapSandbox,
    DockerSandbox,
    ProcessSandbox,
    Sandbox,
    SandboxLimits,
    SandboxResult,
    isolated_command,
    local_sandbox,
    run_code,
)
from atroposlib.errors import EnvError
from tests.builders.rows import rows_in
from tests.faults.hostile_programs import ATTACKS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")

PATIENT = SandboxLimits(wall_s=60)


FAKE_DOCKER = """#!{python}
import json, os, sys
with open({log!r}, "a") as log: log.write(json.dumps(sys.argv[1:]) + "\\n")
if sys.argv[1] == "run":
    command = sys.argv[sys.argv.index("an-image") + 1 :]
    os.execvp("timeout", ["timeout", *command[:3], {python!r}, *command[4:]])
"""
"""Records its arguments, and runs what was to run in a container."""


@pytest.fixture(params=["bubblewrap", "plain", "docker"])
def box(request: pytest.FixtureRequest) -> Sandbox:
    if request.param == "plain":
        return ProcessSandbox()
    if request.param == "docker":
        if (image := os.environ.get("ATROPOS_TEST_DOCKER_IMAGE")) is None:
            pytest.skip("ATROPOS_TEST_DOCKER_IMAGE names no image")
        return DockerSandbox(image)
    return bubblewrap()


def bubblewrap() -> BubblewrapSandbox:
    """Return the sandbox with namespaces; without it a test is skipped, and fails in CI."""
    if not isinstance(found := local_sandbox(), BubblewrapSandbox):
        missing = "bubblewrap is missing or may not create namespaces"
        pytest.fail(missing) if os.environ.get("CI") else pytest.skip(missing)
    return found


def test_a_program_whose_caller_died_while_sending_it_ends() -> None:
    settings = {"num_source_bytes": 100, "limits": {}, "user": None, "is_plain": False}
    settings |= {"namespace_folder": None}
    ended = subprocess.run(
        [sys.executable, "-I", sandbox_child.__file__, repr(settings)],
        input=b"print(1)",
        capture_output=True,
        timeout=30,
        check=False,
    )
    assert ended.stdout == b""
    assert ended.returncode != 0


@pytest.mark.parametrize(
    "box", [BubblewrapSandbox("missing"), DockerSandbox("image", program="missing")]
)
def test_a_sandbox_program_that_is_missing_is_named(box: Sandbox) -> None:
    with pytest.raises(EnvError, match="cannot run missing"):
        run_code("print(1)", sandbox=box)


def run(
    box: Sandbox, source: str, stdin: str = "", limits: SandboxLimits = PATIENT
) -> SandboxResult:
    return run_code(source, stdin=stdin, limits=limits, sandbox=box)


def test_program_reads_its_input_and_its_output_comes_back(box: Sandbox) -> None:
    source = "import sys; print(sum(map(int, sys.stdin)), 'é'); print('no', file=sys.stderr)"
    result = run(box, source, "1\n2\n39\n")
    assert result == SandboxResult(reason="exit", stdout="42 é\n", stderr="no\n", exit_code=0)


@pytest.mark.parametrize(
    ("source", "reason", "exit_code", "said"),
    [
        ("raise SystemExit(3)", "exit", 3, ""),
        ("1 / 0", "exit", 1, "ZeroDivisionError"),
        ("print(", "exit", 1, "SyntaxError"),
        ("bytearray(1 << 40)", "memory", 1, "MemoryError"),
        ("import os; os.abort()", "crash", None, ""),
        ("while True: print('x' * 999)", "output", None, ""),
    ],
)
def test_the_way_it_ended_is_said(
    box: Sandbox, source: str, reason: str, exit_code: int | None, said: str
) -> None:
    result = run(box, source)
    assert (result.reason, result.exit_code) == (reason, exit_code)
    assert said in result.stderr


def test_program_that_reaches_a_time_limit_is_killed(box: Sandbox) -> None:
    asleep = run(box, "import time; time.sleep(99)", limits=SandboxLimits(wall_s=0.5))
    assert asleep.reason == "timeout"


def test_program_that_reaches_its_limit_of_processor_time_is_killed() -> None:
    busy = SandboxLimits(wall_s=60, cpu_s=1)
    assert run(local_sandbox(), "while True: pass", limits=busy).reason == "timeout"


def test_large_program_and_input_pass_through_a_full_pipe(box: Sandbox) -> None:
    source = "x = 0\n" * 50_000 + "import sys; print(len(sys.stdin.read()))"
    assert run(box, source, "y" * 300_000).stdout == "300000\n"
    assert run(box, "print('did not read')", "y" * 300_000).stdout == "did not read\n"


def test_program_inherits_neither_variables_nor_descriptors_nor_the_user(
    box: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HUB_TOKEN", "hush")
    inherited = os.open("/etc/hostname", os.O_RDONLY)
    os.set_inheritable(inherited, True)
    try:
        source = (
            "import os; print(sorted(os.environ)); print(os.getuid() != 0)\n"
            "for fd in range(3, 64):\n"
            "    try: print(fd, os.fstat(fd))\n"
            "    except OSError: pass"
        )
        lines = run(box, source).stdout.splitlines()
    finally:
        os.close(inherited)
    assert len(lines) == 2, lines
    assert "HUB_TOKEN" not in lines[0]
    assert lines[1] == "True"


def test_program_is_the_main_module_and_may_write_in_its_folder(box: Sandbox) -> None:
    source = (
        "import dataclasses, pathlib, sys\n"
        "@dataclasses.dataclass\nclass A: x: int = 1\n"
        "pathlib.Path('here').write_text('kept')\n"
        "if __name__ == '__main__': print(A(), open('here').read(), sys.argv)"
    )
    assert run(box, source).stdout == "A(x=1) kept ['program.py']\n"


def test_namespaces_hide_the_machine(box: Sandbox) -> None:
    if isinstance(box, ProcessSandbox):
        pytest.skip("only namespaces do")
    here = str(Path(__file__))
    source = f"import os, socket; print(os.path.exists({here!r}), len(socket.if_nameindex()))"
    assert run(box, source).stdout == "False 1\n"
    pids = run(box, "import os; print([p for p in os.listdir('/proc') if p.isdigit()])").stdout
    assert len(pids.split(",")) <= 2


@pytest.fixture(params=["namespaces", "cleaned"])
def any_box(
    box: Sandbox, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Sandbox:
    """Return each sandbox, the plain process also where the system permits no namespaces."""
    if request.param == "cleaned":
        if not isinstance(box, ProcessSandbox) or os.geteuid() != 0:
            pytest.skip("only programs with a user of their own can be cleaned up after")
        monkeypatch.setattr(sandbox, "_may_have_namespaces", lambda: False)
    return box


def test_nothing_outlives_a_program(any_box: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    key, token = secrets.randbits(30), secrets.token_hex(16)
    own = tempfile.mkdtemp()
    os.chmod(own, 0o1777)  # a folder of pytest's is below one that only its user may enter
    monkeypatch.setattr(tempfile, "tempdir", own)

    def found_by(program: str) -> SandboxResult:
        program = program.replace("'note'", repr(token)).replace("0x41746F70", str(key))
        return run(any_box, program, token)

    assert found_by(ATTACKS["leave_notes"].source).stderr == ""
    for folder in ("/", "/tmp", "/var/tmp", "/dev/shm", "/run", "/run/lock"):
        assert not os.path.lexists(f"{folder}/{token}")
    os.rmdir(own)  # it is empty
    os.mkdir(own, 0o777)
    assert str(key) not in Path("/proc/sysvipc/shm").read_text().split()
    left = found_by(ATTACKS["read_the_notes_of_siblings"].source)
    assert left == SandboxResult(reason="exit", stdout="", stderr="", exit_code=0)
    os.rmdir(own)


def test_files_and_shared_memory_have_a_limit(box: Sandbox) -> None:
    """4 MiB of /tmp; bubblewrap and Docker have as many in /dev/shm, and keep shared memory until the program ends."""
    allowed = 4 if isinstance(box, ProcessSandbox) else 24
    limits = SandboxLimits(wall_s=60, file_mb=4)
    printed = run(box, ATTACKS["fill_memory_that_is_not_its_own"].source, limits=limits).stdout
    assert 4 <= int(printed) <= allowed


@pytest.mark.parametrize("has_namespaces", [True, False])
def test_plain_process_has_no_network(
    has_namespaces: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket(socket.AF_UNIX) as local:
        local.bind("\0" + (name := secrets.token_hex(8)))
        local.listen()
        source = (
            "import socket\n"
            f"addresses = {{socket.AF_INET: {server.getsockname()}, socket.AF_UNIX: '\\x00{name}'}}\n"
            "for family, address in addresses.items():\n"
            "    try: socket.socket(family).connect(address); print('connected')\n"
            "    except OSError: print('refused')"
        )
        assert subprocess.check_output([sys.executable, "-c", source]) == b"connected\n" * 2
        monkeypatch.setattr(sandbox, "_may_have_namespaces", lambda: has_namespaces)
        assert run(ProcessSandbox(), source).stdout == "refused\n" * 2


@pytest.mark.parametrize("user", [0, 1000])
def test_warning_names_what_is_not_prevented(
    user: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: user)
    named = {"files", "siblings", "network", "shared memory"}
    for has_namespaces, expected in ((True, {"files"}), (False, named)):
        caplog.clear()
        monkeypatch.setattr(sandbox, "_may_have_namespaces", lambda has=has_namespaces: has)
        sandbox._warn_once.__wrapped__()
        assert {word for word in named if word in caplog.text} == expected
        assert ("signal this user's processes" in caplog.text) == (user != 0)
        assert "--require-isolation" in caplog.text


def test_sandbox_that_does_not_start_is_an_error_and_not_a_wrong_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho no namespaces >&2\nexit 1\n")
    broken.chmod(0o755)
    with pytest.raises(EnvError, match=r"did not start: exit status 1\. no namespaces"):
        run(BubblewrapSandbox(str(broken)), "print(1)")
    monkeypatch.setenv("PATH", str(tmp_path))
    local_sandbox.cache_clear()
    try:
        assert isinstance(local_sandbox(), ProcessSandbox)
    finally:
        local_sandbox.cache_clear()


def test_container_has_no_network_and_few_rights_and_ends_with_its_deadline(tmp_path: Path) -> None:
    docker, log = tmp_path / "docker", tmp_path / "log"
    docker.write_text(FAKE_DOCKER.format(python=sys.executable, log=str(log)))
    docker.chmod(0o755)
    box = DockerSandbox("an-image", program=str(docker))
    assert run(box, "print(input())", "hello").stdout == "hello\n"
    result = run(box, "import time; time.sleep(99)", limits=SandboxLimits(wall_s=1, memory_mb=99))
    assert result.reason == "timeout"
    first, second, removal = rows_in(log)
    for options in (
        ["--network", "none"],
        ["--read-only"],
        ["--shm-size", "16m"],
        ["--user", "65534:65534"],
        ["--cap-drop", "ALL"],
        ["--security-opt", "no-new-privileges"],
        ["--memory", "99m", "--memory-swap", "99m"],
        ["--entrypoint", "timeout", "an-image", "-s", "KILL", "6", "python3"],
    ):
        assert " ".join(options) in " ".join(second)
    names = [command[command.index("--name") + 1] for command in (first, second)]
    assert names[0] != names[1]
    assert removal == ["rm", "--force", names[1]]


def test_each_running_program_has_a_user_of_its_own() -> None:
    users = {sandbox._new_user() for _ in range(64)}
    assert len(users) == 64
    assert min(users) > 60_000


def test_any_object_with_run_is_a_sandbox() -> None:
    class Remote:
        def run(self, source: str, *, stdin: str, limits: SandboxLimits) -> SandboxResult:
            return SandboxResult(reason="exit", stdout=f"{source} {stdin}", stderr="", exit_code=0)

    assert run(Remote(), "a", "b").stdout == "a b"


def test_an_interpreter_below_tmp_runs_in_bubblewrap(tmp_path: Path) -> None:
    """A virtual environment is often there in CI; the sandbox has a /tmp of its own."""
    bubblewrap()
    assert tmp_path.is_relative_to("/tmp")
    venv.create(tmp_path / "venv", symlinks=True, with_pip=False)
    program = (
        "from atroposlib.envs.sandbox import BubblewrapSandbox, SandboxLimits\n"
        "print(BubblewrapSandbox().run('print(6 * 7)', stdin='', limits=SandboxLimits()).stdout)"
    )
    paths = os.pathsep.join(path for path in sys.path if path)
    ended = subprocess.run(
        [tmp_path / "venv" / "bin" / "python", "-c", program],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.stdout.split() == ["42"], ended.stderr


def test_isolated_command_sees_what_is_readable_and_has_no_rights(tmp_path: Path) -> None:
    bubblewrap()
    seen, hidden = tmp_path / "seen", tmp_path / "hidden"
    for folder in (seen, hidden, tmp_path):
        folder.mkdir(exist_ok=True)
        folder.chmod(0o755)
        (folder / "note").write_text("1")
    program = f"""
import os, socket
from atroposlib.envs.sandbox import local_sandbox, run_code
print([os.path.exists(f"{{folder}}/note") for folder in ({str(seen)!r}, {str(hidden)!r})])
for path in ("/x", "/dev/x", {str(seen / "x")!r}, "/usr/x"):
    try: print(open(path, "w"))
    except OSError: pass
print(os.getuid() != 0, len(socket.if_nameindex()), [p for p in os.listdir("/proc") if p.isdigit()])
print([line.split()[1] for line in open("/proc/self/status") if line.startswith("CapEff")])
if os.fork() == 0: os._exit(0)
print(os.wait()[1], input(), os.getcwd())
print(type(local_sandbox()).__name__, run_code("print(6 * 7)").stdout)
raise SystemExit(7)
"""
    paths = [path for path in sys.path if path]
    argv = [sys.executable, "-c", program]
    command = isolated_command(argv, readable=[*paths, str(seen), str(tmp_path / "missing")])
    assert command is not None
    ended = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        input="given",
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.stdout.splitlines() == [
        "[True, False]",
        "True 1 ['1', '2']",
        "['0000000000000000']",
        f"0 given {os.getcwd()}",
        "BubblewrapSandbox 42",
        "",
    ], ended.stderr
    assert ended.returncode == 7


def test_isolated_command_ends_with_its_starter(tmp_path: Path) -> None:
    bubblewrap()
    wait = "import time; print(1, flush=True); time.sleep(600)"
    command = isolated_command([sys.executable, "-c", wait], readable=[])
    assert command is not None
    starter = f"import subprocess; subprocess.run({command!r})"
    with subprocess.Popen([sys.executable, "-c", starter], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"1\n"
        process.kill()
        assert process.stdout.read() == b""  # the last process that holds the pipe has ended


def test_files_of_a_program_in_bubblewrap_have_one_limit() -> None:
    """Of the file systems that bubblewrap makes, also those that the user it runs as may write."""
    fill = (
        "for folder in ('/', '/dev', '/dev/shm', '/tmp'):\n"
        "    n = 0\n"
        "    try:\n"
        "        for i in range(9):\n"
        "            with open(f'{folder}/{i}', 'wb') as file: n += file.write(bytes(1 << 20))\n"
        "    except OSError: pass\n"
        "    print(folder, n >> 20)"
    )
    printed = run(bubblewrap(), fill, limits=SandboxLimits(wall_s=60, file_mb=4)).stdout
    assert printed.split() == ["/", "0", "/dev", "0", "/dev/shm", "4", "/tmp", "4"]


def test_without_bubblewrap_there_is_no_isolated_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    local_sandbox.cache_clear()
    try:
        assert isolated_command(["true"], readable=["/"]) is None
    finally:
        local_sandbox.cache_clear()
