"""The page that draws the pool live: `memory_routes` serves one HTML file, one JavaScript file and a stream of changes.

`feed` samples the engine for all open pages and writes the differences; `page.html` and `page.js` draw them without a
build step and without anything from another host.
"""

from jpaged.server.memory_page.feed import MemoryFeed, WatchedEngine
from jpaged.server.memory_page.routes import memory_routes

__all__ = ["MemoryFeed", "WatchedEngine", "memory_routes"]
