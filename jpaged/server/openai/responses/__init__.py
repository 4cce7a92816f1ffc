"""Writes and stores the responses of `/v1/responses`.

answer.py makes the events of one response, job.py runs it in a task, store.py keeps jobs by key, kept_files.py writes
them to disk, and event_replay.py finds the events that are new after a restart.
"""
