"""How many tokens per second the server itself can stream, on a model that costs nothing.

    PYTHONPATH=src python tests/server/bench_overhead.py [--clients 64] [--tokens 400] [--rounds 3]

The server runs in a process of its own; this one holds the clients, as bare sockets, so that they cost little of the
second core. One token is one server-sent event of /v1/chat/completions.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import selectors
import socket
import statistics
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from running_server import RunningServer
from small_model import free_engine


def serve(pipe: Connection) -> None:
    """A server around a free model until the other end says stop."""
    import torch

    torch.set_num_threads(1)
    kv = free_engine(num_blocks=8192, max_model_len=512)
    server = RunningServer(kv, log_level="warning")
    pipe.send(server.port)
    pipe.recv()
    server.stop()
    kv.close()


def stream_all(port: int, clients: int, tokens: int) -> tuple[float, int]:
    """(seconds, events): `clients` streams of `tokens` tokens at once."""
    body = json.dumps({"messages": [{"role": "user", "content": "Hello, how are you?"}], "max_tokens": tokens,
                       "ignore_eos": True, "stream": True, "temperature": 0}).encode()  # fmt: skip
    head = (f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n")  # fmt: skip
    poll = selectors.DefaultSelector()
    socks = [socket.create_connection(("127.0.0.1", port)) for _ in range(clients)]
    began = time.perf_counter()
    for sock in socks:
        sock.sendall(head.encode() + body)
        sock.setblocking(False)
        poll.register(sock, selectors.EVENT_READ)
    events, left = 0, clients
    ends = 0
    while left:
        for key, _ in poll.select():
            data = key.fileobj.recv(1 << 18)  # type: ignore[union-attr]
            if data:
                events += data.count(b'"delta":{"content"')
                ends += data.count(b"[DONE]")
            else:
                poll.unregister(key.fileobj)
                key.fileobj.close()  # type: ignore[union-attr]
                left -= 1
    seconds = time.perf_counter() - began
    if ends != clients:
        raise SystemExit(f"{clients - ends} streams did not end properly")
    return seconds, events


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(there,))
    process.start()
    try:
        port = here.recv()
        stream_all(port, options.clients, 10)
        rates = []
        for _ in range(options.rounds):
            seconds, events = stream_all(port, options.clients, options.tokens)
            expected = options.clients * options.tokens
            if events != expected:
                raise SystemExit(f"{events} events instead of {expected}")
            rates.append(events / seconds)
            print(f"{options.clients} clients x {options.tokens} tokens: {rates[-1]:,.0f} tokens/s", flush=True)
        print(f"median {statistics.median(rates):,.0f} tokens/s")
    finally:
        here.send("stop")
        process.join(30)


if __name__ == "__main__":
    main()
