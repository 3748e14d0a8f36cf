"""One class per kind of inference server, and what they share: the limiter, the retries, the HTTP sessions."""
