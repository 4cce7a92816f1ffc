"""The server's endpoints: one `APIRouter` a file, over `Serving`. `app.routers_of` lists them."""
