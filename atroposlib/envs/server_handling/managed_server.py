"""The original's import path of `atroposlib.inference.sessions.managed_server`."""

from atroposlib.inference.sessions.managed_server import *
from atroposlib.inference.sessions.openai_client import (
    ManagedServerAdapter as ManagedServerAdapter,
)
from atroposlib.inference.sessions.text_sessions import DummyManagedServer as DummyManagedServer
