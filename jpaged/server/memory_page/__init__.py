"""The page that draws the pool live: `memory_routes` serves one HTML file, one JavaScript file and a stream of changes.

`messages` writes what changed from one map to the next, `feed` takes maps for all who watch, and `page.html` and
`page.js` draw them without a build step or anything from another host.
"""

from jpaged.server.memory_page.feed import MemoryFeed, WatchedEngine
from jpaged.server.memory_page.routes import memory_routes

__all__ = ["MemoryFeed", "WatchedEngine", "memory_routes"]
