"""The requests of a model that were admitted."""

from __future__ import annotations

from mlx_flash.generation.member import Reading
from mlx_flash.server.events import Progress
from mlx_flash.server.job import Job
from mlx_flash.server.rows import LeftError
from mlx_flash.server.sampling import named_seed


class Jobs(dict[int, Job]):
    """The requests, by number. Most are computed; some wait for another one that computes the same prompt."""

    def __init__(self) -> None:
        super().__init__()
        self._computed: dict[int, Job] = {}

    def note_computed(self, job: Job, uid: int) -> None:
        """Note that a request is computed.

        Args:
            job: the request.
            uid: its number in the batch.
        """
        job.uid = uid
        self[job.number] = self._computed[uid] = job

    def computed(self, uid: int) -> Job | None:
        """Return the request with this number in the batch; None if it is gone."""
        return self._computed.get(uid)

    def note_prompt(self, uid: int, done: int, total: int) -> None:
        """Note how far a prompt is in the pass under way.

        Args:
            uid: number of the request in the batch.
            done, total: tokens of what the pass computes.

        Raises:
            LeftError: the client has left, so that the pass is in vain.
        """
        job = self._computed.get(uid)
        if job is None or job.prompt is None:
            return
        if job.answer is not None and job.answer.is_over:
            raise LeftError(uid)
        if total == len(job.prompt.tokens) - job.num_cached:
            job.send(Progress("prompt", job.num_cached + done, job.num_cached + total))

    def is_apart(self, uid: int) -> bool:
        """Return whether the request with this number in the batch gets the same answer each time.

        It has a seed, or the hidden states of its prompt are wanted.
        """
        job = self._computed.get(uid)
        has_seed = job is not None and named_seed(job.request.sampling, job.source.defaults) is not None
        return has_seed or self.reading_of(uid) is not None

    def reading_of(self, uid: int) -> Reading | None:
        """Return what is wanted of the hidden states of the prompt with this number in the batch."""
        job = self._computed.get(uid)
        return None if job is None else job.reading

    def leader_of(self, job: Job) -> Job | None:
        """Return a request that computes the same prompt now; None if there is none."""
        assert job.prompt is not None
        for other in self._computed.values():
            if not other.is_prompt_done and other.prompt is not None and other.prompt.tokens == job.prompt.tokens:
                return other
        return None

    def is_awaited(self, job: Job) -> bool:
        """Return whether another request waits for the prompt of this one."""
        return any(other.leader is job and other.uid is None for other in self.values())

    def ready(self) -> list[Job]:
        """Return the requests that wait no longer."""
        waiting = [job for job in self.values() if job.uid is None]
        return [
            job for job in waiting if job.leader is None or job.leader.is_prompt_done or job.leader.number not in self
        ]

    def forget(self, job: Job) -> int | None:
        """Let go of a request. Return its number in the batch; None if it is not computed."""
        self.pop(job.number, None)
        found = None if job.uid is None else self._computed.pop(job.uid, None)
        return None if found is None else found.uid

    def take_all(self) -> list[Job]:
        """Return all requests, and let go of them."""
        jobs = list(self.values())
        self.clear()
        self._computed.clear()
        return jobs
