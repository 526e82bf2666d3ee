"""``flash-monitor``: what running engines do, in another terminal."""
