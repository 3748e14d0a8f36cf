"""The original's import path of `atroposlib.inference.servers.openai`."""

from atroposlib.inference.servers.openai import *
