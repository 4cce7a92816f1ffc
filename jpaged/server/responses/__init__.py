"""Writes responses of `/v1/responses` and keeps them: `answer` makes one's events, `job` runs it, `store` keeps them by
key, `kept_files` lets them outlive the process."""

from jpaged.server.responses.answer import Answer
from jpaged.server.responses.job import Job
from jpaged.server.responses.store import ResponseStore

__all__ = ["Answer", "Job", "ResponseStore"]
