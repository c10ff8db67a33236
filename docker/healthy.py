"""End with 0 where the server in this container serves MODEL_NAME; without that name, where its REST port answers."""

import os
import sys
import urllib.error
import urllib.request

model = os.environ.get("MODEL_NAME", "")
try:
    with urllib.request.urlopen(f"http://127.0.0.1:8501/v1/models/{model}", timeout=2) as answer:
        sys.exit("AVAILABLE" not in answer.read().decode())
except urllib.error.HTTPError:
    sys.exit(bool(model))  # it answers; whether a model that nobody named is served it cannot say
