"""``flash-monitor``: running engines, live, in another terminal."""
