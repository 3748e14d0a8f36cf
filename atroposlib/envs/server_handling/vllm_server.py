"""The original's import path of `atroposlib.inference.servers.vllm`."""

from atroposlib.inference.servers.vllm import *
