"""The original's import path of `atroposlib.inference.servers.openai`."""

from atroposlib.inference.resolve_configs import resolve_openai_configs
from atroposlib.inference.servers.openai import *
