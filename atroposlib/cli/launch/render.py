"""`atropos render`: the files that start a run on a cluster. Secrets stand in none of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from atroposlib.cli.launch import Target
from atroposlib.cli.launch.kubernetes import render_kubernetes, secret_names
from atroposlib.cli.launch.parts import Part, parts_of
from atroposlib.cli.launch.run_file import EnvironmentPart, HubPart, TrainerPart, read_run
from atroposlib.cli.launch.skypilot import render_skypilot
from atroposlib.cli.launch.slurm import render_slurm
from atroposlib.client import TOKEN_VARIABLE

_NOT_ENCRYPTED = (
    "The hub's token and the groups cross the network unencrypted. Use a private network, or give the hub "
    "ssl_certfile and ssl_keyfile below flags."
)


def render(path: Path, *, target: Target, out: Path, directory: Path = Path("runs")) -> str:
    """Write the files of a run into the folder `out`; return how to use them."""
    run = read_run(path)
    parts = _with_token(parts_of(run, on_one_machine=False))
    hub = next((part for part in parts if part.name == "hub"), None)
    warnings = [_NOT_ENCRYPTED] if hub is not None and hub.scheme == "http" else []
    if target == "slurm":
        files = render_slurm(run, parts, run_dir=(directory / run.name).absolute())
        hint = f"{out}/submit.sh"
    else:
        use = f"kubectl apply -f {out}/run.yaml"
        documents = render_kubernetes(run, parts) if target == "kubernetes" else []
        notes = [
            f"The volume claim {run.kubernetes.volume} must exist, and the secret:",
            f"  kubectl create secret generic {run.name}-secrets"
            + "".join(f" --from-literal={name}=..." for name in secret_names(parts)),
        ]
        if target == "skypilot":
            secrets = "".join(f" --secret {name}" for name in secret_names(parts))
            use = f"sky jobs launch{secrets} {out}/run.yaml"
            notes = [f"The volume {run.kubernetes.volume} must exist (sky volumes apply)."]
            documents = render_skypilot(run, parts)
        lines = "\n".join((f"Start it: {use}", *notes, *warnings)).splitlines()
        head = "".join(f"# {line}\n" for line in lines)
        files = {"run.yaml": head + _dump(documents)}
        hint = use
    out.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (out / name).write_text(text, encoding="utf-8")
        (out / name).chmod(0o755 if name == "submit.sh" else 0o644)
    return "\n".join([f"wrote {', '.join(files)} to {out}/", *warnings, f"next: {hint}"])


def _with_token(parts: Sequence[Part]) -> list[Part]:
    """Give our own programs the hub's token: a hub that other machines reach needs one."""
    if not any(part.name == "hub" for part in parts):
        return list(parts)
    token = {TOKEN_VARIABLE: f"${{{TOKEN_VARIABLE}}}"}
    users = (HubPart, TrainerPart, EnvironmentPart)
    return [
        replace(part, env={**token, **part.env}) if isinstance(part.section, users) else part
        for part in parts
    ]


def _dump(documents: Sequence[dict[str, Any]]) -> str:
    return "---\n" + yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=110)


class _Dumper(yaml.SafeDumper):
    """Writes scripts as blocks, and no anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _string(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _string)
