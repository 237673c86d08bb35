"""The page at `/` of a server: plain HTML, CSS and ES modules beside the router that serves them."""
