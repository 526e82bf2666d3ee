"""The planner: what stays in memory, what is streamed, and how fast that will be."""
