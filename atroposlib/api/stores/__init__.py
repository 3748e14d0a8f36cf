"""Where queued payloads live: `base` is the contract, `memory` keeps them in the process."""
