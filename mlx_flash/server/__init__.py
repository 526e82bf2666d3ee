"""The server: requests of several dialects, models under one budget, and passes that requests share.

A request's way: `app` -> a dialect, which checks it and makes a `GenerationRequest` -> `room`, where the thread that
owns MLX takes it in -> `loop` (admission) -> `loaded` (a row in a batch) -> `text` (pieces) -> `answer` (events) -> the
dialect's reply.
"""
