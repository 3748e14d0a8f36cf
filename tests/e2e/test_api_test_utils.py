"""A hub for other projects' tests."""

import json
import socket
import urllib.request

import pytest

from atroposlib.errors import HubUnavailable
from atroposlib.tests.api_test_utils import launch_api_for_testing
from tests.processes import free_port

pytestmark = pytest.mark.e2e


def test_launched_hub_answers_and_is_the_callers_to_stop() -> None:
    port = free_port()
    process = launch_api_for_testing(60, port=port)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/status", timeout=10) as answer:
            assert json.load(answer)["queue_size"] == 0
        with pytest.raises(HubUnavailable, match="already answers there"):
            launch_api_for_testing(60, port=port)
    finally:
        process.terminate()
    assert process.wait(30) == 0


def test_taken_port_is_an_error_that_says_so() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and no more: a connection is refused at once
        port = taken.getsockname()[1]
        with pytest.raises(HubUnavailable, match=f"port {port} ended with status"):
            launch_api_for_testing(60, port=port)


def test_hub_that_takes_too_long_is_stopped() -> None:
    with pytest.raises(HubUnavailable, match="did not answer in time"):
        launch_api_for_testing(0, port=free_port())
