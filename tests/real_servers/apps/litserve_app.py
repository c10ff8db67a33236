"""A LitServe app whose batch takes 2 ms + 0.05 ms a row."""

from __future__ import annotations

import os
import time

import litserve as ls


class API(ls.LitAPI):
    def setup(self, device):
        pass

    def decode_request(self, request):
        return request["input"]

    def batch(self, inputs):
        return inputs

    def predict(self, x):
        rows = x if isinstance(x, list) and x and isinstance(x[0], list) else [x]
        time.sleep(0.002 + 0.00005 * len(rows))
        answers = [sum(row) for row in rows]
        return answers if rows is x else answers[0]

    def unbatch(self, output):
        return output

    def encode_response(self, output):
        return {"output": output}


if __name__ == "__main__":
    api = API(
        max_batch_size=int(os.environ["MAX_BATCH_SIZE"]), batch_timeout=float(os.environ["BATCH_TIMEOUT"])
    )
    server = ls.LitServer(api, accelerator="cpu", workers_per_device=int(os.environ["WORKERS_PER_DEVICE"]))
    server.run(
        host="127.0.0.1", port=int(os.environ["PORT"]), generate_client_file=False, log_level="warning"
    )
