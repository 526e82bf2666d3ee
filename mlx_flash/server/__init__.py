"""The server: requests of several dialects, models under one budget, and passes that requests share.

A request's way: `serving` -> `service` (limits, and checks of its fields) -> a dialect, which translates it to a
`GenerationRequest` and a `Writer` of the reply -> `room`, whose generation thread takes it in as a `Job` -> `models` ->
`loaded` (prompt and admission) -> `batch` (passes) -> `text` (pieces) -> `events` -> `service`, by the writer.
"""
