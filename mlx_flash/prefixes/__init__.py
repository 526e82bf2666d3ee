"""The prefix cache: keys and values of prompts, kept on disk for later processes."""
