"""Has what is done with each path: an `APIRouter` a file, all over `Serving`."""
