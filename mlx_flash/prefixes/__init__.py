"""The prefix cache: the beginnings of prompts, kept on disk for later sessions and processes."""
