"""What stays in memory, and how much memory there is."""
