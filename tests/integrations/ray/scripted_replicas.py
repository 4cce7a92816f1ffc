"""Replicas whose answers are scripts: lists of ASGI messages, errors and events to wait for."""

from __future__ import annotations

import asyncio
import json

from ray.exceptions import ActorDiedError

from jpaged.integrations.ray.hints import REPLICA
from jpaged.server.errors import ApiError
from jpaged.server.protocols import protocol_of

DIED = ActorDiedError()
DIED_AT_ONCE = ActorDiedError()


class Replicas:
    """Replicas with a script for each call, in order of the calls."""

    def __init__(self, *scripts):
        self.scripts = list(scripts)
        self.asked = []
        self.num_cancelled = 0

    def remote(self, hint, scope, body):
        self.asked.append((hint, scope, body))
        return Call(self, self.scripts.pop(0), f"r{len(self.asked)}")


class Several:
    """Replicas that answer by name; the first whom the hint does not avoid is asked, as the router does."""

    def __init__(self, **scripts):
        self.scripts = scripts
        self.asked = []
        self.num_cancelled = 0

    def remote(self, hint, scope, body):
        others = [name for name in self.scripts if name not in hint.avoid] or [*self.scripts]
        name = hint.only if hint.only in self.scripts else others[0]
        self.asked.append((name, scope["path"]))
        return Call(self, self.scripts[name], name)


class Call:
    def __init__(self, replicas, script, name):
        self._replicas = replicas
        self._steps = iter([{"type": REPLICA, "name": name}, *script] if script != [DIED_AT_ONCE] else script)

    def __aiter__(self):
        return self

    async def __anext__(self):
        await asyncio.sleep(0)
        step = next(self._steps, None)
        if step is None:
            raise StopAsyncIteration
        if isinstance(step, Exception):
            raise step
        if isinstance(step, asyncio.Event):
            await step.wait()
            return []
        return [step]

    def cancel(self):
        self._replicas.num_cancelled += 1


def start(status=200, kind=b"application/json"):
    return {"type": "http.response.start", "status": status, "headers": [(b"content-type", kind)]}


def piece(data, more=False):
    return {"type": "http.response.body", "body": data, "more_body": more}


def whole(text=b'{"ok": 1}', status=200):
    return [start(status), piece(text)]


def refusal(status, code):
    return whole(json.dumps(protocol_of("").error(ApiError("no", status=status, code=code), None)).encode(), status)
