"""Loading tokenizers where the hub of models cannot be reached."""

from pathlib import Path

import pytest

from atroposlib.errors import ConfigError
from atroposlib.utils.tokenizers import is_at_hand, load_tokenizer
from tests.processes import free_port
from tests.tiny_model import make_tiny_tokenizer


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of a hub of models that cannot be reached; its local cache is `tmp_path`."""
    from huggingface_hub import constants

    url = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    return url


def test_unreachable_hub_is_named_and_not_asked_again(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ConfigError, match=f"'a/b': it is not in the local cache, and {url} cannot"):
        load_tokenizer("a/b")
    assert not is_at_hand("a/b")
    assert "Retrying" not in caplog.text


def test_cached_tokenizer_is_used_where_the_hub_cannot_be_reached(
    url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = tmp_path / "models--a--b"
    make_tiny_tokenizer().save_pretrained(model / "snapshots" / "1")
    (model / "snapshots" / "1" / "config.json").write_text('{"model_type": "qwen2"}')
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("1")
    assert is_at_hand("a/b")
    assert is_at_hand(str(model / "snapshots" / "1"))
    assert load_tokenizer("a/b").encode("ab") == make_tiny_tokenizer().encode("ab")
    assert f"using the cached tokenizer 'a/b': {url} cannot be reached" in caplog.text
    assert "Retrying" not in caplog.text
