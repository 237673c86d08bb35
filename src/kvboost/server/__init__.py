"""The OpenAI-compatible server: FastAPI over the one engine. Needs the extra: pip install 'kvboost[server]'."""
