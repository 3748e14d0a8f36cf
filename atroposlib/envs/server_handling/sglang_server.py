"""The original's import path of `atroposlib.inference.servers.sglang`."""

from atroposlib.inference.servers.sglang import *
