"""Pages for people: rollouts as HTML."""
