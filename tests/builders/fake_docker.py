"""A program in the place of `docker`: its containers are folders, in which bubblewrap runs the commands."""

from __future__ import annotations

import os
import sys
from pathlib import Path

_PROGRAM = """#!{python}
import os, pathlib, shutil, sys, tarfile
top = pathlib.Path({top!r})
command, *rest = sys.argv[1:]
with open(top / "log", "a") as log:
    log.write(" ".join(sys.argv[1:])[:200].replace("\\n", " ") + "\\n")
if command == "run":
    shutil.copytree(top / "images" / rest[-2], top / rest[rest.index("--name") + 1], symlinks=True)
elif command == "build":
    shutil.copytree(top / "images" / "base", top / "images" / "built", symlinks=True)
    shutil.copytree(rest[-1], top / "images" / "built" / "app", dirs_exist_ok=True)
    print("built")
elif command == "exec":
    folder = rest[1] if rest[0] == "--workdir" else "/app"
    name, *argv = rest[2:] if rest[0] == "--workdir" else rest
    seen = [option for path in {seen!r} for option in ("--ro-bind", path, path)]
    os.execvp("bwrap", ["bwrap", "--bind", str(top / name), "/", *seen, "--dev", "/dev", "--unshare-pid",
                        "--setenv", "PYTHONDONTWRITEBYTECODE", "1", "--chdir", folder, *argv])
elif command == "cp" and rest[0] == "-":
    with tarfile.open(fileobj=sys.stdin.buffer, mode="r|") as tar:
        tar.extractall(top / rest[1].partition(":")[0], filter="tar")
elif command == "cp":
    name, _, path = rest[-2].partition(":")
    if not (top / name / path[1:]).exists():
        sys.exit("no such file")
    with tarfile.open(fileobj=sys.stdout.buffer, mode="w|") as tar:
        tar.add(top / name / path[1:], arcname=os.path.basename(path))
elif command == "rm":
    shutil.rmtree(top / rest[-1])
"""


def fake_docker(top: Path) -> Path:
    """Write the program below `top`; return the folder of its image `base`, in which /app is the working folder.

    The caller puts `top` in front of PATH.
    """
    program, base = top / "docker", top / "images" / "base"
    own = {sys.prefix, os.path.realpath(sys.prefix), sys.base_prefix}
    seen = ["/usr", *sorted(path for path in own if not path.startswith("/usr"))]
    program.write_text(_PROGRAM.format(python=sys.executable, top=str(top), seen=seen))
    program.chmod(0o755)
    for folder in ("app", "tmp", "usr", "dev"):
        (base / folder).mkdir(parents=True)
    for link in ("bin", "lib", "lib64", "sbin"):
        if os.path.islink(f"/{link}"):
            (base / link).symlink_to(os.readlink(f"/{link}"))
    return base
