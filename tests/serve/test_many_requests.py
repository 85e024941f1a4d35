"""A server keeps nothing of answered requests: no file, no thread, no line of its metrics."""

from __future__ import annotations

import gc
import os
import re
import threading

from tests.growth import grown, lengths
from tests.serve.running import Client, serving
from tests.toy import ToyBackend, toy_engine


def ask(client: Client, number: int) -> None:
    """A request of its own kind, with a new name wherever a client may give one."""
    fields = {"segment": f"s{number}", "user": f"u{number}", "seed": number, "max_tokens": 1 + number % 3}
    text = f"TEXT {number}"
    if number % 5 == 0:
        client.post("/v1/chat/completions", {"messages": [{"role": "user", "content": text}], **fields})
    elif number % 5 == 1:
        client.complete(**fields, stream=True, cache_salt=text)
    elif number % 5 == 2:
        client.complete(**fields, no_such_field=number)
    elif number % 5 == 3:
        client.post(f"/v1/nothing{number}", {}, x_request_id=f"r{number}")
    else:
        client.stream(**{**fields, "max_tokens": 500}).close()


def lines_of_metrics(client: Client) -> int:
    return len(re.findall(rb"\n", client.get("/metrics").body))


def test_nothing_grows_with_the_number_of_requests() -> None:
    engine = toy_engine(ToyBackend(max_rows=64), max_model_len=1000, num_pages=600, max_num_seqs=4)
    with serving(engine, max_segments=3) as client:
        lines_of_metrics(client)  # which has a line of its own
        for number in range(40):
            ask(client, number)
        gc.collect()
        files, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
        lines, before = lines_of_metrics(client), lengths(engine, ("batches", "contexts", "pages"))
        for number in range(40, 100):
            ask(client, number)
        gc.collect()
        assert len(os.listdir("/proc/self/fd")) <= files + 2  # of a connection that is being closed
        assert threading.active_count() <= threads + 1
        assert lines_of_metrics(client) == lines
        after = lengths(engine, ("batches", "contexts", "pages"))
        assert {path: sizes for path, sizes in grown(before, after).items() if sizes[1] > sizes[0] + 20} == {}
