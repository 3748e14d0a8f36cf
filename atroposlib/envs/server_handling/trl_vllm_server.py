"""The original's import path of `atroposlib.inference.servers.trl`."""

from atroposlib.inference.servers.trl import *
