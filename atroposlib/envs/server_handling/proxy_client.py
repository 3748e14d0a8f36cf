"""The original's import path of `atroposlib.inference.sessions.proxy_client`."""

from atroposlib.inference.sessions.proxy_client import *
