"""What environments of tests have in common."""

from atroposlib.inference.harness import ByteTokenizer


class Offline:
    """First base of an environment: its tokenizer needs no files."""

    def load_tokenizer(self) -> ByteTokenizer:
        return ByteTokenizer()
